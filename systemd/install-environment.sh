#!/bin/sh
# install-environment.sh LIBDIR [DESTDIR]: the program and all that it needs, in a Python environment of its own at
# DESTDIR/LIBDIR that will run as LIBDIR. It is made beside the one that is there, which a failure leaves as it was.
# PYTHON names the interpreter; without it, it is one of the system's that is new enough.
set -eu
umask 022
cd "$(dirname "$0")/.."
library=$1 target=${2:-}$1

# The service may not look into home folders, where pyenv, conda and uv keep their interpreters.
check='
import os, sys
homes = (os.path.realpath(home) + "/" for home in ("/home", "/run/user", os.path.expanduser("~root")))
home = os.path.realpath(sys.base_prefix).startswith(tuple(homes))
sys.exit("is %d.%d, and 3.11 or later is needed" % sys.version_info[:2] if sys.version_info < (3, 11)
         else "lies in a home folder, where the service may not look" if home else None)
'
if [ -n "${PYTHON:-}" ]; then
  found=$(command -v "$PYTHON") || { echo "PYTHON=$PYTHON: there is no such program" >&2; exit 1; }
  "$found" -c "$check" || { echo "PYTHON=$PYTHON cannot run the service" >&2; exit 1; }
else
  found=
  for candidate in /usr/bin/python3 /usr/bin/python3.[1-9][0-9] /usr/local/bin/python3 /usr/local/bin/python3.[1-9][0-9]; do
    if [ -x "$candidate" ] && "$candidate" -c "$check" 2>/dev/null; then
      found=$candidate
      break
    fi
  done
  [ -n "$found" ] || { echo "no Python 3.11 or later in /usr/bin or /usr/local/bin: install one, or name one by PYTHON=" >&2; exit 1; }
fi

# By its full version: with another one, after an upgrade of the system, nothing of this would be found.
found=$("$found" -c 'import os, sys; print(os.path.realpath(sys.executable))')

new=$target.new old=$target.old
put_back() { [ -e "$target" ] || [ ! -e "$old" ] || mv "$old" "$target"; }
trap 'put_back; rm -rf "$new"' EXIT
trap 'exit 1' HUP INT TERM
put_back # what an installation that was killed has left
rm -rf "$new" "$old"
mkdir -p "$(dirname "$target")"
"$found" -m venv "$new" || { echo "$found cannot make environments (Debian: apt-get install python3-venv)" >&2; exit 1; }
"$new/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --root-user-action=ignore '.[all]'
"$new/bin/python" -m pip uninstall --quiet --yes --root-user-action=ignore setuptools pip 2>/dev/null
# What is left is the interpreter and the program, under the name that it is to have.
find "$new/bin" -mindepth 1 ! -name 'python*' -delete
rm -rf "$new/include" "$new/share"
find "$new" -name direct_url.json -delete
cat > "$new/bin/gpu-fleet-exporter" <<END
#!$library/bin/python3 -I
import sys

from exporter.cli import main

sys.exit(main())
END
chmod 755 "$new/bin/gpu-fleet-exporter"
sed -i '/^command = /d' "$new/pyvenv.cfg"
"$found" -m compileall -q -s "$new" -p "$library" --invalidation-mode checked-hash "$new/lib"

[ ! -e "$target" ] || mv "$target" "$old"
mv "$new" "$target"
rm -rf "$old"
