"""Messages of the control plane, and their encoding."""
