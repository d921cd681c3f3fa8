#!/usr/bin/env bash
# The quick start of MindSpore's cache, step by step, with hotset's server in its place.
#
#     examples/quickstart_session.sh [cifar-10-batches-bin]
#
# The folder is CIFAR-10's binary version; without it a small one is written in that format. $PORT is the
# server's port.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
cache_admin() { hotset cache-admin --port "${PORT:-50052}" "$@"; }

# 1. Start the cache server. What happens later, it is stopped at the end.
cache_admin --start
trap 'cache_admin --stop' EXIT

# 2. Create a session. Its id is the last word of the last line.
created=$(cache_admin -g)
echo "$created"
session_id=$(awk 'END {print $NF}' <<< "$created")

# 3. Run the training script, which caches in the session.
python "$here/quickstart_session.py" --session-id "$session_id" ${1:+--dataset-dir "$1"}

# 4. The job has ended, and its five rows are still there.
cache_admin --list_sessions

# 5. Destroy the session, which frees its memory.
cache_admin --destroy_session "$session_id"

# 6. Stop the server: the trap above.
