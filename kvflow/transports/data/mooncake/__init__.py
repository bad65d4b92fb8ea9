"""The data plane that uses the Mooncake Transfer Engine."""
