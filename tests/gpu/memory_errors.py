"""Starts that cannot fit must say what to change: memory_errors.py SERVER MODEL DEVICE"""

from __future__ import annotations

import subprocess
import sys

# Too much for a GPU of today with a model of 0.5B.
TOO_MUCH = (
    ("kv_cache_bytes=200000000000", "max_num_seqs=512", "max_model_len=32768"),
    ("max_batched_tokens=16000000",),
)


def main() -> None:
    """Starts the server with settings that need too much memory."""
    server, model, device = sys.argv[1:]
    for settings in TOO_MUCH:
        command = [
            server,
            *("server.grpc_port=0", "server.metrics_port=0", f"senior_model={model}"),
            *(f"compute.device={device}", "compute.dtype=bfloat16", *settings),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        said = done.stderr.strip().splitlines()[-1]
        print(*settings, done.returncode, said, flush=True)
        assert done.returncode != 0, said
        assert "kv_cache_bytes" in said and "max_batched_tokens" in said, said
    print("every start that cannot fit names the settings")


if __name__ == "__main__":
    main()
