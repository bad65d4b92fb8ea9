"""The engines' scheduling: which requests take part in which model step."""
