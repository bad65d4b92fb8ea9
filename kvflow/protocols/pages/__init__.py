"""Descriptions of pools, and plans for copies between them."""
