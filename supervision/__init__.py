"""What OTP gives: mailboxes, actors, supervisors. Knows nothing of chat."""
