#!/usr/bin/env bash
# Fetches a Debian package's original source as a plain tar file, by apt, which checks its signature and checksum.
# Needs no root and changes nothing of the machine's apt. Usage: scripts/fetch-source.sh PACKAGE TARGET.tar
set -euo pipefail
package=$1 target=$2
[ -s "$target" ] && exit 0
mkdir -p "$(dirname "$target")"
work=$(mktemp -d "$target.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/sources.d"
# The machine's own sources, asked for source packages instead of binary ones.
sed -s -n 's/^deb \(.*\)/deb-src \1/p' /etc/apt/sources.list 2>/dev/null >"$work/sources.list" || true
for file in /etc/apt/sources.list.d/debian*.sources; do
    [ -e "$file" ] && sed 's/^Types:.*/Types: deb-src/' "$file" >"$work/sources.d/$(basename "$file")"
done
options=(-qq -o "Dir::Etc::SourceList=$work/sources.list" -o "Dir::Etc::SourceParts=$work/sources.d"
    -o "Dir::State::Lists=$work/lists" -o "Dir::Cache::pkgcache=" -o "Dir::Cache::srcpkgcache=")
cd "$work"
if ! apt-get "${options[@]}" update >log 2>&1 || ! apt-get "${options[@]}" source --download-only "$package" >>log 2>&1; then
    tail -n 5 log >&2
    echo "fetch-source: apt cannot fetch the source of $package" >&2
    exit 1
fi
archive=$(ls "${package}"_*.orig.tar.* | grep -v '\.asc$' | head -n 1)
case $archive in
*.gz) gzip -dc "$archive" >plain.tar ;;
*.xz) xz -dc "$archive" >plain.tar ;;
*.bz2) bzip2 -dc "$archive" >plain.tar ;;
esac
mv plain.tar "$target"
