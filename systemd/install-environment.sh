#!/bin/sh
# install-environment.sh build|swap LIBDIR [DESTDIR]: the program and all that it needs, in a Python environment of its own at
# DESTDIR/LIBDIR that will run as LIBDIR. It is built beside the one that is there, tried, and then put in its place; a
# failure leaves the one that is there as it was. PYTHON names the interpreter; without it, it is one of the system's that
# is new enough.
set -eu
umask 022
cd "$(dirname "$0")/.."
step=$1 library=$2 target=${3:-}$2
new=$target.new old=$target.old

if [ "$step" = swap ]; then
  trap '[ -e "$target" ] || [ ! -e "$old" ] || mv "$old" "$target"' EXIT
  trap 'exit 1' HUP INT TERM
  [ ! -e "$target" ] && [ ! -L "$target" ] || mv "$target" "$old"
  mv "$new" "$target"
  rm -rf "$old"
  exit
fi

# It stands in units, in the first line of a program, and in this project's Makefile.
case $library in
  *[!A-Za-z0-9._/+-]* | [!/]*)
    echo "PREFIX: found '${library%/lib/*}', expected an absolute path of letters, digits and ._+-" >&2
    exit 1 ;;
esac
case $(realpath -m "$library") in
  "$(realpath -m /home)"/* | "$(realpath -m ~root)"/* | /run/user/* | /tmp/* | /var/tmp/* | /dev/*)
    echo "PREFIX: found '${library%/lib/*}', where the service may not look" >&2
    exit 1 ;;
esac
# Packages that these name would be taken for there already, or put elsewhere.
unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT

# The service may not look into home folders, where pyenv, conda and uv keep their interpreters, and has its own /tmp.
check='
import os, sys
hidden = ("/home", "/run/user", "/tmp", "/var/tmp", os.path.expanduser("~root"))
place = os.path.realpath(sys.base_prefix)
home = place.startswith(tuple(os.path.realpath(folder) + "/" for folder in hidden))
sys.exit("is %d.%d, and 3.11 or later is needed" % sys.version_info[:2] if sys.version_info < (3, 11)
         else "lies in " + place + ", where the service may not look" if home else None)
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

# What an installation that was killed has left.
[ -e "$target" ] || [ ! -e "$old" ] || mv "$old" "$target"
rm -rf "$new" "$old"
mkdir -p "$new"
trap '[ $? = 0 ] || rm -rf "$new"' EXIT
trap 'exit 1' HUP INT TERM
"$found" -m venv "$new" || { echo "$found cannot make environments (Debian: apt-get install python3-venv)" >&2; exit 1; }
pip() { "$new/bin/python" -I -m pip --disable-pip-version-check "$@"; }
pip install --quiet --no-compile --root-user-action=ignore '.[all]'
pip check --quiet
pip uninstall --quiet --yes --root-user-action=ignore setuptools pip 2>/dev/null
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

"$new/bin/python3" -I -m exporter --version > /dev/null
