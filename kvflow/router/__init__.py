"""The router: one client request as two legs, one at a prefill and one at a decode."""
