"""The Debian package: built, checked by lintian, and installed, upgraded, removed and purged under a real systemd."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import nvml
from tests.fakes.nvml import FakeNvml, equal_cards
from tests.fakes.shared_object import fail_in_ci_else_skip
from tests.service_host import UNIT, ServiceHost, copy_source, service_host

pytestmark = pytest.mark.e2e

SOCKET = "gpu-fleet-exporter.socket"
SETTINGS = "/etc/gpu-fleet-exporter/config.yaml"
OWN = "fleets:\n  - {name: mine, runtime: host}\n"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make deb` builds of this tree."""
    missing = [name for name in ("dpkg-buildpackage", "dh", "lintian") if shutil.which(name) is None]
    if missing or not Path("/etc/debian_version").exists():
        fail_in_ci_else_skip(f"a package for Debian needs {', '.join(missing) or 'Debian'}")
    source = tmp_path_factory.mktemp("source") / "tree"
    copy_source(source)
    built = subprocess.run(["make", "-C", str(source), "deb"], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    (found,) = (source / "dist").glob("*.deb")
    return found


@pytest.fixture(scope="module")
def newer(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The next version of the package, with other settings by default."""
    tree = tmp_path_factory.mktemp("newer") / "tree"
    subprocess.run(["dpkg-deb", "--raw-extract", str(package), str(tree)], check=True)
    for path in (tree / "DEBIAN/control", *tree.glob("usr/lib/*/lib/python3*/site-packages/exporter/__init__.py")):
        path.write_text(re.sub(r"(Version: |__version__ = \")[^\"\n]*", r"\g<1>99.0", path.read_text()))
    settings = tree / SETTINGS.lstrip("/")
    settings.write_text(f"# Newer.\n{settings.read_text()}")
    found = package.with_name("newer.deb")
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "--build", str(tree), str(found)], check=True, capture_output=True
    )
    return found


@pytest.fixture(scope="module")
def host(package: Path, newer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceHost]:
    """A booted machine with four cards and the two packages, none of them installed."""
    with service_host(tmp_path_factory.mktemp("machine")) as machine:
        place = machine.root / "opt/fakes"
        place.mkdir(mode=0o755)
        shutil.copy2(
            nvml.build_or_skip(place / "build") / "libnvidia-ml.so.1", machine.root / "usr/lib/x86_64-linux-gnu"
        )
        FakeNvml(place).write(equal_cards(4))
        machine.write("/etc/default/gpu-fleet-exporter", "FAKE_NVML_STATE=/opt/fakes/nvml.state\n")
        shutil.copy2(package, machine.root / "opt/older.deb")
        shutil.copy2(newer, machine.root / "opt/newer.deb")
        machine.boot()
        yield machine


def dpkg(host: ServiceHost, *arguments: str) -> str:
    return host.do("dpkg", *arguments, DEBIAN_FRONTEND="noninteractive")


def cards(host: ServiceHost, fleet: str) -> int:
    return len(host.scrape().of("gpu_temperature_celsius", fleet=fleet))


def version(host: ServiceHost) -> str:
    return host.scrape().of("gpu_exporter_build_info")[0].labels["version"]


def states(host: ServiceHost) -> tuple[str, str, str, str]:
    """Service and socket: active or not, enabled or not."""
    service, socket = (host.show("ActiveState", "UnitFileState", unit=unit) for unit in (UNIT, SOCKET))
    return service["ActiveState"], service["UnitFileState"], socket["ActiveState"], socket["UnitFileState"]


def named_like_it(host: ServiceHost) -> set[str]:
    """The machine's files and folders of that name, but those of its kernel and of the manual's cache."""
    found = host.do("find", "/", "-xdev", "-name", "*gpu-fleet-exporter*", "-not", "-path", "/var/cache/man/*")
    return set(found.splitlines())


def test_lintian_finds_no_error_and_no_warning(package: Path) -> None:
    """What it has to say else is in the overrides, each with its reason."""
    checked = subprocess.run(
        ["lintian", "--allow-root", "--fail-on=error,warning", str(package)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout) == (0, ""), checked.stdout + checked.stderr


def test_every_package_that_comes_along_has_its_license_told(package: Path, tmp_path: Path) -> None:
    """debian/copyright names each of what pip put in, which a new dependency would change unseen."""
    subprocess.run(["dpkg-deb", "--extract", str(package), str(tmp_path)], check=True)
    told = (tmp_path / "usr/share/doc/gpu-fleet-exporter/copyright").read_text()
    brought = {path.name.split("-")[0] for path in tmp_path.rglob("*.dist-info")} - {"gpu_fleet_exporter"}
    assert len(brought) > 10
    assert {name for name in brought if f"/site-packages/{name}-*" not in told} == set()


def test_the_package_has_nothing_of_the_place_where_it_was_built(package: Path, tmp_path: Path) -> None:
    """Neither in its texts nor in its bytecode."""
    subprocess.run(["dpkg-deb", "--extract", str(package), str(tmp_path)], check=True)
    place = os.fsencode(package.parents[1])
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and place in path.read_bytes()]


def test_from_installation_to_purge(host: ServiceHost) -> None:
    """Installed it serves; upgraded it serves anew with the settings as they were; removed and purged nothing is left
    but the user, its groups and what the administrator made.
    """
    there = named_like_it(host)
    dpkg(host, "--install", "/opt/older.deb")
    assert states(host) == ("active", "enabled", "inactive", "disabled")
    assert cards(host, "host") == 4
    for unit in (UNIT, SOCKET):
        verified = host.run("systemd-analyze", "verify", f"/lib/systemd/system/{unit}")
        assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")

    host.write(SETTINGS, OWN)
    host.do("systemctl", "reload", UNIT)
    host.do("mkdir", "-p", f"/etc/systemd/system/{UNIT}.d")
    link = f"/etc/systemd/system/{UNIT}.d/process-fleets.conf"
    host.do("ln", "-s", "/usr/share/gpu-fleet-exporter/process-fleets.conf", link)
    before = host.main_pid()
    dpkg(host, "--force-confold", "--install", "/opt/newer.deb")
    assert host.main_pid() != before
    assert version(host) == "99.0"
    assert (host.do("cat", SETTINGS), cards(host, "mine")) == (OWN, 4)
    assert host.do("cat", f"{SETTINGS}.dpkg-dist").startswith("# Newer.")
    assert states(host) == ("active", "enabled", "inactive", "disabled")

    dpkg(host, "--remove", "gpu-fleet-exporter")
    assert host.members() == []
    assert host.do("cat", SETTINGS) == OWN
    assert host.run("gpu-fleet-exporter", "--version").returncode == 127

    dpkg(host, "--purge", "gpu-fleet-exporter")
    assert named_like_it(host) == there
    assert host.show("LoadState")["LoadState"] == "not-found"
    assert host.do("getent", "passwd", "gpu-fleet-exporter").endswith("/nologin\n")


def test_a_socket_that_is_enabled_stays_up_through_an_upgrade(host: ServiceHost) -> None:
    """Its administrator wanted no scrape lost; removal takes both away, and no scrape brings the service back."""
    dpkg(host, "--install", "/opt/older.deb")
    host.do("systemctl", "stop", UNIT)
    host.do("systemctl", "enable", "--now", SOCKET)
    since = host.show("ActiveEnterTimestampMonotonic", unit=SOCKET)
    assert cards(host, "host") == 4
    dpkg(host, "--install", "/opt/newer.deb")
    assert host.show("ActiveEnterTimestampMonotonic", unit=SOCKET) == since
    assert version(host) == "99.0"
    dpkg(host, "--purge", "gpu-fleet-exporter")
    assert host.run("python3", "-c", "import socket; socket.create_connection(('localhost', 10420))").returncode == 1
    assert host.members() == []
