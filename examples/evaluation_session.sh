#!/usr/bin/env bash
# Evaluation during training, from a cache that a session keeps: start the server, make a session, hand its id
# to the training script, and stop the server, which frees the memory.
#
#     examples/evaluation_session.sh [options of evaluation_session.py]
#
# bootup_cache_server and generate_cache_session do what the reference's cache_util.sh does. $PORT is the
# server's port.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
cache_admin() { hotset cache-admin --port "${PORT:-50052}" "$@"; }

bootup_cache_server() {
    echo "Booting up cache server..."
    cache_admin --start 2>&1
}

generate_cache_session() {
    cache_admin -g | awk 'END {print $NF}'
}

bootup_cache_server
trap 'cache_admin --stop' EXIT
CACHE_SESSION_ID=$(generate_cache_session)
python "$here/evaluation_session.py" --cache-session-id "$CACHE_SESSION_ID" "$@"
cache_admin --list_sessions
