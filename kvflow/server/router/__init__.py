"""One request as two legs."""
