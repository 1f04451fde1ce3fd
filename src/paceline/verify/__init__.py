"""The proof that many processes compute what one computes."""
