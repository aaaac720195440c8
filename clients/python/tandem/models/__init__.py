"""Model directories: import, files, weights, tokenizers, the Hugging Face Hub."""
