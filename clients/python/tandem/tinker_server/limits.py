"""The bounds of a server, beside those of requests in openai_server.limits.

docs/reference/limits.md lists them.
"""

from __future__ import annotations

# Seconds without a sign of life after which a session has ended; the SDK sends one every 10.
SESSION_SECONDS = 60
# Sessions that are remembered, and sampling sessions.
MAX_SESSIONS = 4096
MAX_SAMPLING_SESSIONS = 65536

# Answers that are kept for their client, and the bytes of all of them.
MAX_ANSWERS = 65536
MAX_ANSWERS_BYTES = 256 << 20
# Requests of the model in training that wait for their turn.
MAX_WAITING = 1024
# Seconds that a request for an answer waits for it; the SDK gives up after 45.
WAIT_SECONDS = 30

# Tokens of forward_backward between two steps of the optimizer.
MAX_STEP_TOKENS = 16 << 20
# Data of a request, as client/config tells the SDK, and about how many bytes they have.
MAX_CHUNK_DATA = 1024
MAX_CHUNK_BYTES = 5_000_000

# Samples of a request, and likeliest tokens at a place: the rollout server's bound.
MAX_SAMPLES = 4096
MAX_TOP_LOGPROBS = 128
# Sampled sequences whose authors are remembered, and the tokens of all of them.
MAX_SEQUENCES = 65536
MAX_SEQUENCES_TOKENS = 64 << 20
# Bytes of the name of a checkpoint.
MAX_NAME_BYTES = 128
