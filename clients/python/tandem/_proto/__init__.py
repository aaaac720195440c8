"""The contract, generated from proto/ by generate_protos.py."""
