"""Start agents on hosts over the user's OpenSSH client."""
