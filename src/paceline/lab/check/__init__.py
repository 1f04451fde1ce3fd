"""The rules of `paceline launch --check`, and its report."""
