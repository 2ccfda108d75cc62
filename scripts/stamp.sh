#!/usr/bin/env bash
# Writes the date and the commit of a measurement into its result files, each a JSON object, as their first fields.
# Usage: scripts/stamp.sh FILE.json...
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
commit=$(git -C "$here" rev-parse --short=8 HEAD 2>/dev/null || echo unknown)
for file in "$@"; do
    sed -i -e '1s/^{"date": "[^"]*", "commit": "[^"]*",\{0,1\} \{0,1\}/{/' \
        -e "1s/^{/{\"date\": \"$(date +%F)\", \"commit\": \"$commit\", /" -e '1s/ $//' "$file"
done
