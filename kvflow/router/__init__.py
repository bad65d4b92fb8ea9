"""The router: it serves each client request as two legs, one at a prefill and one at a decode."""
