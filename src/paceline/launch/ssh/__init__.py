"""Hosts reached by the user's own OpenSSH client."""
