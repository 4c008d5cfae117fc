#!/usr/bin/env bash
# tools/dist.sh FOLDER [PYTHON]: make the sdist and the wheel in FOLDER, from the tracked files as they are. The same files
# give the same bytes, whoever does it, and when. PYTHON has what the extra `release` brings. GNU tar is needed.
#
# On PyPI the relative links of README lead nowhere. LINKS in the environment makes them whole: it is the URL of the
# project's files at this version, to which their names are appended.
set -euo pipefail
mkdir -p "$1"
out=$(realpath "$1")
python=$(realpath -s "${2:-.venv/bin/python}")
cd "$(dirname "$0")/.."

export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tree" "$work/built" "$work/sdist"

# A copy, so that nothing of an earlier build gets in.
umask 022
git ls-files -z | tar --null -T - --mode=u=rwX,go=rX -c | tar -x -C "$work/tree"
if [ -n "${LINKS:-}" ]; then
  sed -i -E "s|\]\(([[:alpha:]][^):]*)\)|](${LINKS%/}/\1)|g" "$work/tree/README.md"
fi
"$python" -m build --no-isolation --outdir "$work/built" "$work/tree" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }

# setuptools writes who has built the sdist, and when: pack it again.
tar -x -C "$work/sdist" -f "$work"/built/*.tar.gz
name=$(ls "$work/sdist")
tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX \
  --format=pax --pax-option=delete=atime,delete=ctime -C "$work/sdist" -c "$name" | gzip -9n >"$out/$name.tar.gz"
mv "$work"/built/*.whl "$out"
