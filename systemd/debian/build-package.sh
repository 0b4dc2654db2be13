#!/bin/sh
# Builds dist/gpu-fleet-exporter_VERSION_ARCH.deb of the working tree, which may be a checkout or an unpacked archive.
# SOURCE_DATE_EPOCH is the time of the package; without it, it is that of the newest commit, and without git now.
set -eu
umask 022
export LC_ALL=C
cd "$(dirname "$0")/../.."
name=gpu-fleet-exporter

for program in dpkg-buildpackage dh; do
  command -v $program >/dev/null && continue
  echo "$program is missing: apt-get install build-essential debhelper python3-venv" >&2
  exit 1
done

# In Debian, ~ sorts before everything, and a development version before the candidates of its release.
release=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' exporter/__init__.py)
version=$(echo "$release" | sed -E 's/[.]?dev([0-9]+)/~~dev\1/; s/([0-9])(a|b|rc)([0-9]+)/\1~\2\3/')
dpkg --validate-version "$version"

# A git that stands above an unpacked archive is another project's.
epoch=${SOURCE_DATE_EPOCH:-}
[ -n "$epoch" ] || [ ! -e .git ] || epoch=$(git log -1 --format=%ct) || epoch=
epoch=${epoch:-$(date +%s)}

tree=build/deb/$name
rm -rf build/deb
mkdir -p "$tree" dist
# Two checkouts of one commit differ in their files' times.
tar --create --mtime="@$epoch" --exclude=__pycache__ --exclude=node_modules --exclude=systemd/debian Makefile pyproject.toml README.md \
  LICENSE CHANGELOG.md config.example.yaml docs exporter grafana prometheus systemd | tar --extract --directory "$tree"
cp -R systemd/debian "$tree/debian"
cat > "$tree/debian/changelog" <<END
$name ($version) unstable; urgency=medium

  * Version $release. What is new: /usr/share/doc/$name/CHANGELOG.md

 -- $(sed -n 's/^Maintainer: //p' systemd/debian/control)  $(date --utc --rfc-email --date="@$epoch")
END

# debhelper gives the build another home folder, in which pip would not find the user's own index and certificates.
settings=${XDG_CONFIG_HOME:-${HOME:-/nonexistent}/.config}/pip/pip.conf
[ -n "${PIP_CONFIG_FILE:-}" ] || [ ! -e "$settings" ] || export PIP_CONFIG_FILE="$settings"

# Where make called this, its variables (PREFIX, PYTHON) would reach the package's own.
(cd "$tree" && env -u MAKEFLAGS -u MFLAGS -u MAKEOVERRIDES -u UNIT_DIR -u SYSUSERS_DIR \
  dpkg-buildpackage --build=binary --no-sign --no-pre-clean)
mv "build/deb/${name}_${version}_$(dpkg --print-architecture).deb" dist/
ls dist/"${name}_${version}"_*.deb
