#!/usr/bin/env bash
# tools/install.sh VENV ARGUMENT...: what `pip install ARGUMENT...` does in the environment VENV, by uv: pip takes seven
# times as long. Where uv is not to be had, or fails, pip installs.
#
# uv does not read pip's configuration, so this tells it what stands there about where packages come from.
set -euo pipefail
venv=$1
shift
quiet=$([[ -t 1 ]] || echo --quiet)
config=$("$venv/bin/pip" config list)

configured() {  # configured NAME: all values that pip's files and PIP_NAME have, in one line
  sed -n "s/^[^.]*\.$1='\(.*\)'\$/\1/p" <<<"$config" | sed 's/\\n/ /g' | sort -u | xargs
}

by_uv() {
  [[ -x $venv/bin/uv ]] || "$venv/bin/pip" install --quiet --no-compile --disable-pip-version-check -c constraints.txt uv || return
  local index cert
  index=$(configured index-url) cert=$(configured cert)
  # pip asks all indexes, and takes the best version of all.
  UV_FIND_LINKS=$(configured find-links | tr ' ' ,) UV_INDEX=$(configured extra-index-url) \
  UV_DEFAULT_INDEX=${index:-https://pypi.org/simple} ${cert:+env "SSL_CERT_FILE=$cert"} \
    "$venv/bin/uv" pip install $quiet --python "$venv/bin/python" --index-strategy unsafe-best-match "$@"
}

by_uv "$@" || "$venv/bin/pip" install $quiet --no-compile --disable-pip-version-check "$@"
