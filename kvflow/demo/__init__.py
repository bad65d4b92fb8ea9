"""`kvflow demo`: the whole way on this machine, checked against stock transformers, with one abort in mid-transfer."""
