"""What this machine takes for a model's operators, for an engine's ops and for collectives: measured for plans."""
