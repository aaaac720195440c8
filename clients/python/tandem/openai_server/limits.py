"""The bounds of a server, so that no client can take its memory or its time.

docs/reference/limits.md lists them.
"""

from __future__ import annotations

# Requests at a time, those that wait included.
MAX_REQUESTS = 1024
# Generate and Score calls at a time. A connection to a rollout server carries 128 calls, and it
# runs or holds 64 Score calls.
MAX_STREAMS = 96
MAX_SCORES = 32
# Seconds after which a client that is told to come back may try again.
RETRY_SECONDS = 1

# Seconds in which a new connection must bring the headers of a request.
HEADER_SECONDS = 60
# Bytes of a body (ids as JSON take more than in the 4 MiB of a message, and images a third more
# than their files), bytes of the bodies of all requests that are not answered, and the time in
# which a body must arrive.
MAX_BODY_BYTES = 32 << 20
MAX_BODIES_BYTES = 128 << 20
BODY_SECONDS = 60

# Prompts of a request times n, and the tokens of all these prompts.
MAX_CHOICES = 4096
MAX_PROMPT_TOKENS = 4 << 20
# Bytes of a prompt's text for each token of max_model_len: more cannot fit, whatever it says.
MAX_TEXT_BYTES_PER_TOKEN = 32
# Messages of a conversation, and parts of all of them.
MAX_MESSAGES = 4096
MAX_PARTS = 4096
# Likeliest tokens at a place: OpenAI's bound for chats.
MAX_TOP_LOGPROBS = 20
# Tools of a request.
MAX_TOOLS = 128
# Stop texts of a request, and the characters of one.
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
# Elements of a list in `tandem`: the rollout server's bound of boundary_token_ids.
MAX_TANDEM_LIST = 4096

# Seconds in which a client must take the next part of a stream, which holds a place.
SEND_SECONDS = 60

# Seconds for running answers after SIGTERM. Then they end with an error.
STOP_SECONDS = 5.0

# Sessions that are open, or finished and not dropped yet; the trajectories of one; and the bytes
# of all of them, beyond which no call of a session begins.
MAX_SESSIONS = 4096
MAX_SESSION_TRAJECTORIES = 64
MAX_SESSIONS_BYTES = 512 << 20
# Seconds after which a session without a call is discarded.
SESSION_IDLE_SECONDS = 3600
# Ids of sessions that have ended, which are remembered so that no late call begins them anew.
MAX_ENDED_SESSIONS = 65536
# Finished sessions of one answer, and about how many bytes they may have; one is always there.
MAX_PAGE_SESSIONS = 256
MAX_PAGE_BYTES = 16 << 20
