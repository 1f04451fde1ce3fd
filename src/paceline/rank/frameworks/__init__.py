"""Stops and resumes the trainers of frameworks: one module for each framework."""
