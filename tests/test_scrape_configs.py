"""The scrape configurations of ``prometheus/``: Prometheus takes each, and finds the targets that it is to find."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from exporter import catalog
from exporter.model import FAULT_REASONS
from tests.harness import Prometheus, free_port, tool

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "prometheus"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
SCRIPT = FOLDER / "slurm-targets.sh"
KUBERNETES = FOLDER / "scrape-kubernetes.yaml"
AGENT = FOLDER / "agent.yaml"


def promtool(path: Path, *flags: str) -> tuple[int, str]:
    """What ``promtool check config`` says of a file, and its exit status."""
    command = [tool("promtool"), "check", "config", *flags, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.returncode, done.stdout + done.stderr


def settings_of(path: Path) -> dict[str, Any]:
    """A configuration's settings."""
    read: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return read


def with_files(path: Path, folder: Path, targets: Sequence[Mapping[str, object]]) -> Path:
    """A configuration with a file of these targets in place of its discovery, without rules, and in a hurry."""
    (folder / "targets.json").write_text(json.dumps(targets), encoding="utf-8")
    settings = settings_of(path) | {"rule_files": []}
    settings["global"]["scrape_interval"] = "1s"
    job = settings["scrape_configs"][0] | {"scrape_timeout": "1s", "file_sd_configs": [{"files": ["targets.json"]}]}
    job.pop("kubernetes_sd_configs", None)
    settings["scrape_configs"] = [job]
    written = folder / "prometheus.yaml"
    written.write_text(json.dumps(settings), encoding="utf-8")
    return written


class Running(Prometheus):
    """A real Prometheus with the configuration of a file, beside which its data lie."""

    def __init__(self, path: Path) -> None:
        self.port, self.log_path = free_port(), path.parent / "prometheus.log"
        flags = [f"--config.file={path}", f"--storage.tsdb.path={path.parent / 'tsdb'}"]
        command = [tool("prometheus"), *flags, f"--web.listen-address=127.0.0.1:{self.port}"]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def found(self, count: int) -> set[tuple[str, str]]:
        """Instance and URL of each target, once there are as many."""
        self.wait_for(f"count(up) == {count}")
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            connection.request("GET", "/api/v1/targets?state=active")
            targets = json.loads(connection.getresponse().read())["data"]["activeTargets"]
        return {(target["labels"]["instance"], target["scrapeUrl"]) for target in targets}


# --- every configuration


@pytest.mark.e2e
@pytest.mark.parametrize(
    "path", [each for each in CONFIGS if each not in (KUBERNETES, AGENT)], ids=lambda path: path.name
)
def test_prometheus_takes_the_configuration(path: Path) -> None:
    """Prometheus' own checker finds nothing wrong with the file, nor with the rules that it names."""
    status, said = promtool(path)
    assert status == 0, said
    assert "SUCCESS" in said


@pytest.mark.e2e
def test_an_agent_takes_the_configuration(tmp_path: Path) -> None:
    """The checker takes agent.yaml for an agent; with rules in it, it would not."""
    status, said = promtool(AGENT, "--agent")
    assert status == 0, said
    ruled = tmp_path / "agent.yaml"
    ruled.write_text(f"{AGENT.read_text(encoding='utf-8')}\nrule_files: [rules/*.yaml]\n", encoding="utf-8")
    status, said = promtool(ruled, "--agent")
    assert (status, "rule_files" in said) == (1, True)


@pytest.mark.e2e
def test_prometheus_takes_the_configuration_for_kubernetes(tmp_path: Path) -> None:
    """The checker takes it; one built without Kubernetes, as Debian's is, takes all of it but the discovery."""
    status, said = promtool(KUBERNETES)
    if "field kubernetes_sd_configs not found" in said:
        status, said = promtool(with_files(KUBERNETES, tmp_path, []))
    assert status == 0, said


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_rules_run_where_the_samples_are_kept(path: Path) -> None:
    """Who keeps the exporters' samples has the rules, evaluated as often; an agent and a federation have none."""
    settings = settings_of(path)
    if path.name in ("agent.yaml", "federate.yaml"):
        assert "rule_files" not in settings
        return
    assert settings["rule_files"] == ["rules/*.yaml"]
    assert settings["global"]["evaluation_interval"] == settings["global"]["scrape_interval"]


def test_only_a_federation_keeps_foreign_labels() -> None:
    """The labels job and instance of a scraped page count nowhere but where the page is another Prometheus'."""
    jobs = {path.name: job for path in CONFIGS for job in settings_of(path)["scrape_configs"]}
    assert [name for name, job in jobs.items() if job.get("honor_labels")] == ["federate.yaml"]
    assert jobs["federate.yaml"]["params"] == {"match[]": ['{__name__=~"cluster(_fleet)?:gpu_.+"}']}


# --- what is found


@pytest.mark.e2e
def test_the_example_of_a_list_is_one(tmp_path: Path) -> None:
    """A real Prometheus has every target of the example, under its instance where it has one."""
    text = (FOLDER / "targets.example.json").read_text(encoding="utf-8")
    # Names of this host, on a port where nobody answers.
    local = json.loads(text.replace(".example.org:10420", ".localhost:9"))
    with Running(with_files(FOLDER / "scrape-file-sd.yaml", tmp_path, local)) as prometheus:
        found = prometheus.found(3)
    assert found == {
        ("gpu-a1", "http://gpu-a1.localhost:9/metrics"),
        ("gpu-b1.localhost:9", "http://gpu-b1.localhost:9/metrics"),
        ("gpu-b2.localhost:9", "http://gpu-b2.localhost:9/metrics"),
    }


def pod(node: str, address: str, phase: str = "Running") -> dict[str, object]:
    """A pod as the API server tells of it: its own address is never the one that is scraped."""
    told = {"pod_node_name": node, "pod_host_ip": address, "pod_phase": phase}
    return {"targets": ["192.0.2.1:8080"], "labels": {f"__meta_kubernetes_{name}": text for name, text in told.items()}}


@pytest.mark.e2e
def test_pods_are_scraped_at_their_node_under_its_name(tmp_path: Path) -> None:
    """A running pod is its node's address with the exporter's port; one that has ended or has no node is no target."""
    pods = [
        pod("n1", "127.0.0.1"),
        pod("n2", "::1"),
        pod("n3", "127.0.0.3", "Failed"),
        pod("n4", "127.0.0.4", "Succeeded"),
        pod("", "", "Pending"),
    ]
    with Running(with_files(KUBERNETES, tmp_path, pods)) as prometheus:
        found = prometheus.found(2)
    assert found == {("n1", "http://127.0.0.1:10420/metrics"), ("n2", "http://[::1]:10420/metrics")}


def snippets() -> list[Any]:
    """The settings that the page on scaling shows, in their order."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/scaling.md").read_text(encoding="utf-8"), re.M | re.S)
    return [yaml.safe_load(block) for block in blocks]


@pytest.mark.e2e
def test_every_host_falls_to_one_shard(tmp_path: Path) -> None:
    """As the page on scaling has it, each host is one server's, and of some tens each server has some."""
    job = snippets()[0]["scrape_configs"][0]
    hosts = [f"gpu{number}.localhost:9" for number in range(40)]
    (tmp_path / "targets.json").write_text(json.dumps([{"targets": hosts}]), encoding="utf-8")
    hash_, keep = job["relabel_configs"]
    jobs = [
        {
            "job_name": f"shard {shard}",
            "file_sd_configs": [{"files": ["targets.json"]}],
            "relabel_configs": [hash_, keep | {"regex": str(shard)}],
        }
        for shard in range(hash_["modulus"])
    ]
    path = tmp_path / "prometheus.yaml"
    settings = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs}
    path.write_text(json.dumps(settings), encoding="utf-8")
    with Running(path) as prometheus:
        assert {instance for instance, _ in prometheus.found(len(hosts))} == set(hosts)
        assert len(prometheus.query("count by (job) (up)")) == hash_["modulus"]


def test_what_is_left_out_is_what_the_page_says() -> None:
    """The names that the page on scaling has a scrape ask for exist, and of the faults it keeps the crashes alone."""
    asked, thrown = snippets()[1:]
    assert {*asked["params"]["name[]"]} <= {family.name for family in catalog.FAMILIES}
    regex = thrown["metric_relabel_configs"][0]["regex"]
    kept = [reason for reason in FAULT_REASONS if not re.fullmatch(regex, f"{catalog.BACKEND_FAULTS.name};{reason}")]
    assert kept == ["crashed"]
    assert not [family.name for family in catalog.FAMILIES if re.fullmatch(regex, f"{family.name};")]


# --- Slurm's nodes


class Slurm:
    """A folder with a pretend ``sinfo``, and the script run with that first on its path."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.file = folder, folder / "slurm.json"
        self._bin = folder / "bin"
        self._bin.mkdir()

    def says(self, *lines: str, status: int = 0) -> None:
        """``sinfo`` prints these lines, if it is asked as it should be, and ends with that status."""
        (self._folder / "nodes").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        sinfo = self._bin / "sinfo"
        asked = "--noheader --Node --format=%N|%G"
        sinfo.write_text(
            f"#!/bin/sh\n[ \"$*\" = '{asked}' ] || exit 64\ncat '{self._folder}/nodes'\nexit {status}\n",
            encoding="utf-8",
        )
        sinfo.chmod(0o755)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The script, to its end."""
        environment = os.environ | {"PATH": f"{self._bin}:{os.environ['PATH']}"}
        command = ["sh", str(SCRIPT), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)

    def targets(self, *arguments: str) -> dict[str, str]:
        """The addresses that a run printed, by instance."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return addresses(done.stdout)


def addresses(text: str) -> dict[str, str]:
    """The addresses in a list for ``file_sd_configs`` by instance."""
    entries = json.loads(text)
    found = {entry["labels"]["instance"]: entry["targets"][0] for entry in entries}
    assert entries == [{"targets": [address], "labels": {"instance": name}} for name, address in found.items()]
    return found


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """Three nodes, two of which have GPUs, one in two partitions."""
    made = Slurm(tmp_path)
    made.says("gpu01|gpu:a100:4(S:0-1),mps:400", "gpu02|gpu:2", "cpu01|(null)", "gpu02|gpu:2", "gpu01 |gpu:a100:4")
    return made


def test_nodes_with_a_gpu_are_listed_once(slurm: Slurm) -> None:
    """A node in two partitions is one target, a node without GPUs none, and the port is the exporter's."""
    assert slurm.targets() == {"gpu01": "gpu01:10420", "gpu02": "gpu02:10420"}


def test_the_port_is_an_option(slurm: Slurm) -> None:
    """``-p`` is the port of every target, and one that is no number is refused before anything is asked."""
    assert slurm.targets("-p", "9400") == {"gpu01": "gpu01:9400", "gpu02": "gpu02:9400"}
    done = slurm.run("-p", "http")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    ("gres", "has_gpu"),
    [
        ("gpu", True),
        ("gpu:1", True),
        ("gpu(S:0)", True),
        ("gpu:a100:8(S:0,1)", True),
        ("craynetwork:4,gpu:h100:8", True),
        ("gpu:0", False),
        ("gpu:a100:0", False),
        ("gpumem:80G", False),
        ("nic:gpu:1", False),
        ("bandwidth:lustre:4(gpu,x)", False),
        ("", False),
    ],
)
def test_what_counts_as_a_gpu(slurm: Slurm, gres: str, has_gpu: bool) -> None:
    """A Gres named gpu of any type counts, unless there are none of it; one that only looks like it does not."""
    slurm.says(f"n1|{gres}")
    assert slurm.targets() == ({"n1": "n1:10420"} if has_gpu else {})


@pytest.mark.parametrize(
    "arguments", [("-p", "0"), ("-p", "65536"), ("-p", "999999"), ("-p", "x"), ("a", "b"), ("-q",)]
)
def test_bad_arguments_are_refused(slurm: Slurm, arguments: Sequence[str]) -> None:
    """A port that is none, a second file and an unknown option end with status 2, and nothing is printed."""
    slurm.says("a|gpu:1")
    done = slurm.run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")


def test_a_folder_is_no_file(slurm: Slurm, tmp_path: Path) -> None:
    """A folder in place of the file is told, and nothing is put into it."""
    slurm.says("a|gpu:1")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert slurm.run(str(folder)).returncode == 2
    assert list(folder.iterdir()) == []


def test_no_node_with_a_gpu_is_an_empty_list(slurm: Slurm) -> None:
    """Where sinfo works and no node has a GPU, the file has no targets any more."""
    slurm.file.write_text("[1]", encoding="utf-8")
    slurm.says("cpu01|(null)")
    assert slurm.run(str(slurm.file)).returncode == 0
    assert json.loads(slurm.file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(("lines", "status"), [(["gpu01|gpu:4"], 1), ([], 0), (["", ""], 0)])
def test_a_failing_sinfo_takes_no_target_away(slurm: Slurm, lines: Sequence[str], status: int) -> None:
    """Where sinfo fails, even after some output, or prints nothing, the file stays, and the status is 1."""
    assert slurm.run(str(slurm.file)).returncode == 0
    before = slurm.file.read_bytes()
    slurm.says(*lines, status=status)
    for arguments in ([str(slurm.file)], []):
        done = slurm.run(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert "sinfo" in done.stderr
    assert slurm.file.read_bytes() == before


def test_strange_names_are_left_out_and_told(slurm: Slurm) -> None:
    """A name that no host has costs its own target alone, whatever is in it, and is told once."""
    strange = ('a"b', "a\\b", "a b", "a,b", "-a", "a:1", "ä", "$(id)")
    slurm.says(*(f"{name}|gpu:1" for name in (*strange, *strange, "gpu-1.cluster_2")))
    done = slurm.run()
    assert addresses(done.stdout) == {"gpu-1.cluster_2": "gpu-1.cluster_2:10420"}
    assert sorted(line.partition("host: ")[2] for line in done.stderr.splitlines()) == sorted(strange)


def test_the_file_is_replaced_in_one_step(slurm: Slurm) -> None:
    """A new file takes the old one's place, readable by Prometheus' user, and nothing else is left in the folder."""
    slurm.file.write_text("[]", encoding="utf-8")
    slurm.file.chmod(0o600)
    before = slurm.file.stat().st_ino
    held = slurm.file.open(encoding="utf-8")
    with held:
        assert slurm.run(str(slurm.file)).returncode == 0
        assert held.read() == "[]"
    assert slurm.file.stat().st_ino != before
    assert slurm.file.stat().st_mode & 0o777 == 0o644
    assert addresses(slurm.file.read_text(encoding="utf-8")) == slurm.targets()
    assert sorted(path.name for path in slurm.file.parent.iterdir()) == ["bin", "nodes", "slurm.json"]
