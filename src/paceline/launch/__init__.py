"""Where processes come from: a job becomes a plan, agents carry it out, and nothing outlives its parent. No torch."""
