"""The data plane over the Mooncake Transfer Engine."""
