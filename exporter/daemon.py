"""The daemon: builds the objects, owns start, reload and stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from exporter import __version__, backends, capabilities, config, fleets, masks
from exporter.catalog import selection
from exporter.collectors import ReloadStatus
from exporter.config import Settings
from exporter.errors import ConfigError, CouldNot, ExporterError
from exporter.fleets.watch import Watch
from exporter.model import Fleet, Snapshot, VendorOutcome
from exporter.probe import Prober
from exporter.sampler import Sampler, Source
from exporter.systemd import ServiceManager
from exporter.telemetry import Transitions, status
from exporter.web import app, server
from exporter.web.front import Front

log = logging.getLogger("exporter.daemon")

_STOP_SECONDS = 1.0
# What is waited for pages once the daemon stops: enough for cards that are slow, and within what a stop may take.
_LAST_PAGES_SECONDS, _LEAST_PAGE_SECONDS = 1.5, 0.2
_READY_SECONDS = 10.0


PORT = 10420


class Options(NamedTuple):
    """The command line, checked. Without addresses the pages are served on the service manager's sockets, or, where it
    gives none, on :data:`PORT` of every address.
    """

    config_file: str | None = None
    listen_addresses: Sequence[str] = ()
    telemetry_path: str = "/metrics"
    lifecycle: bool = False
    sysfs: str = "/sys"
    procfs: str = "/proc"
    web_config_file: str | None = None
    max_requests: int = 0


def load_settings(path: str | None) -> Settings:
    """The settings of a file, or the defaults without one; raises :class:`ConfigError`."""
    known = {"runtimes": tuple(masks.RUNTIMES), "backends": tuple(backends.BACKENDS)}
    return config.parse("", "(no file)", **known) if path is None else config.load(path, **known)


Observe = Callable[[Snapshot, Sequence[VendorOutcome]], None]


class Host:
    """The sampler over this host's workers, and how to give it other settings."""

    def __init__(self, options: Options, environ: Mapping[str, str], observe: Observe) -> None:
        """``observe`` is told of each finished cycle."""
        capabilities.withhold()  # from what this thread starts: workers, threads, and what asks drivers
        self._options, self._environ = options, environ
        self._sources: dict[str, Source] = {}
        self._prober = Prober(environ)
        self._fleets = self._starting = fleets.Fleets((), None)
        self._ending = False
        self.sampler = Sampler(observe, self._prober)
        self.settings = Settings()

    async def take(self, settings: Settings, others: Sequence[Fleet] = ()) -> tuple[Source, ...]:
        """Serve by these settings from now on, and ``others`` beside their fleets; returns the sources that are to be
        stopped. The processes are looked at first, so that their fleets are there when those of earlier settings go.
        """
        self._starting = watched = fleets.Fleets((*self._stated(settings), *others), self._watch(settings))
        await asyncio.to_thread(watched.start)
        if self._ending:
            raise CouldNot("the daemon is stopping")
        dropped = self._configure(settings, watched)
        self._fleets.stop()
        self._fleets = watched
        return dropped

    def _stated(self, settings: Settings) -> tuple[Fleet, ...]:
        return fleets.from_settings(settings, self._environ, tuple(_vendors(settings)))

    def _watch(self, settings: Settings) -> Watch | None:
        entries = [entry for entry in settings.fleets if fleets.is_live(entry)]
        if not entries:
            return None
        return Watch(
            entries,
            procfs=self._options.procfs,
            sysfs=self._options.sysfs,
            most=settings.mapping.max_fleets,
            scan_seconds=settings.sampling.scan_seconds,
            before=self._fleets.watch,
        )

    def _configure(self, settings: Settings, watched: fleets.Fleets) -> tuple[Source, ...]:
        vendors = _vendors(settings)
        wanted = selection(settings.metrics.include, settings.metrics.exclude).asked
        sources = {vendor: self._source(vendor, settings.libraries.get(vendor), wanted) for vendor in vendors}
        for source in sources.values():
            source.named = settings.names(source.vendor)
        dropped = self.sampler.configure(tuple(sources.values()), watched, settings)
        self._sources, self.settings = sources, settings
        return dropped

    def _source(self, vendor: str, library: str | None, wanted: frozenset[str]) -> Source:
        """The source that serves already, unless it is to read by another library or other metrics, or does without a
        library by now.
        """
        known = self._sources.get(vendor)
        same = known is not None and (known.shared_object, known.wanted) == (library, wanted)
        if known is not None and same and not known.supervisor.cautious:
            return known
        return Source(vendor, self._options.sysfs, self._options.procfs, library, wanted)

    async def snapshot(self) -> Snapshot:
        """One cycle within the settings' deadline."""
        return await self.sampler.snapshot(self.settings.sampling.deadline_seconds)

    async def answered(self, within_seconds: float) -> None:
        """Wait for the drivers that are being asked."""
        await self._prober.answered(within_seconds)

    def prepare_stop(self, within_seconds: float) -> None:
        """Whoever waits for a snapshot has it within that time; whoever waits for processes waits no longer."""
        self._ending = True
        self.sampler.cut_short(within_seconds)
        for watched in (self._fleets, self._starting):
            watched.stop()

    async def stop(self, within_seconds: float) -> None:
        """End the workers, and whatever else was started."""
        await asyncio.gather(self.sampler.stop(within_seconds), self._prober.stop(within_seconds))


def _vendors(settings: Settings) -> Sequence[str]:
    return settings.backends or [name for name in backends.BACKENDS if name not in backends.ON_REQUEST]


class Daemon:
    """Serves until told to stop. It is the :class:`exporter.web.site.Site` of its pages."""

    def __init__(self, options: Options, environ: Mapping[str, str], manager: ServiceManager) -> None:
        self._options, self._manager = options, manager
        self._transitions = Transitions()
        self._host = Host(options, environ, self._observe)
        self._stopping, self._stop_until = asyncio.Event(), math.inf
        self._tasks: set[asyncio.Task[None]] = set()
        self._reloading = asyncio.Lock()
        self.telemetry_path = options.telemetry_path
        self.lifecycle = options.lifecycle
        self.ready = False
        self._started = False
        self._summary = "starting"
        self.reload_status = ReloadStatus(False, 0.0)

    @property
    def metrics_prefix(self) -> str:
        """What the settings put in front of every family's name."""
        return self._host.settings.metrics.prefix

    @property
    def deadline_seconds(self) -> float:
        """The settings' upper bound of a scrape's wait."""
        return self._host.settings.sampling.deadline_seconds

    async def snapshot(self, within_seconds: float) -> Snapshot:
        """The host's state now."""
        left = max(self._stop_until - time.monotonic(), _LEAST_PAGE_SECONDS)
        return await self._host.sampler.snapshot(min(within_seconds, left))

    def _observe(self, snapshot: Snapshot, outcomes: Sequence[VendorOutcome]) -> None:
        self._transitions.see(snapshot, outcomes)
        self._summary = status(snapshot)
        self._tell_status()

    def _tell_status(self) -> None:
        earlier = "" if self.reload_status.successful else "settings not loaded, the earlier ones hold; "
        self._manager.status(f"{earlier}{self._summary}")

    async def reload(self) -> None:
        """Load the settings, build everything, then swap; a bad file keeps the old settings and raises."""
        async with self._reloading:
            if self._stopping.is_set():
                raise CouldNot("the daemon is stopping")
            if not self._started:
                await self._reload()
                return
            self._manager.reloading()
            try:
                await self._reload()
            finally:
                self._manager.ready()
                self._tell_status()
            self._spawn(self._cycle())  # which the status line is of

    async def _reload(self) -> None:
        path, ended = self._options.config_file, self.reload_status._replace(successful=False)
        try:
            for source in await self._host.take(load_settings(path)):
                self._spawn(source.supervisor.stop(_STOP_SECONDS))
            ended = ReloadStatus(True, time.time())
            log.info("settings loaded", extra={"fields": {"file": path or "none"}})
        except ConfigError as error:
            log.error("settings not loaded, the earlier ones hold", extra={"fields": {"error": error}})  # noqa: TRY400
            raise
        finally:
            if not self._stopping.is_set():  # which is no fault of the settings
                self.reload_status = ended

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("internal error", exc_info=error)

    async def run(self) -> None:
        """Start, serve, stop. Raises :class:`ExporterError` when it cannot start."""
        front = Front(
            self._options.web_config_file,
            telemetry_path=self.telemetry_path,
            max_requests=self._options.max_requests,
        )
        with contextlib.ExitStack() as opened:
            await self._serve(front, self._listen(opened))

    async def _serve(self, front: Front, sockets: list[socket.socket]) -> None:
        self._spawn(self._manager.feed_watchdog())
        if self._options.web_config_file is not None:
            self._spawn(front.follow())
        await self.reload()
        self._install_signals()
        http = server.Server(app.create(self), front)
        serving = asyncio.create_task(http.serve(sockets))
        for address in server.addresses(sockets):
            url = None if address.startswith("unix:") else f"http{'s' if front.tls else ''}://{address}/"
            fields = {"address": address, "url": url, "version": __version__}
            log.info("listening", extra={"fields": fields})
        self._spawn(self._warm_up())
        stopped = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([serving, stopped], return_when=asyncio.FIRST_COMPLETED)
        self._stop_until = time.monotonic() + _LAST_PAGES_SECONDS
        self._host.prepare_stop(_LAST_PAGES_SECONDS)
        http.stop()
        await serving  # who waits for a page has it before the workers end
        await self._host.stop(_STOP_SECONDS)
        log.info("stopped")

    def _listen(self, opened: contextlib.ExitStack) -> list[socket.socket]:
        """The service manager's sockets, and those of the addresses that were asked for, which ``opened`` closes: the
        file that a socket has made must not outlive it.
        """
        handed = self._manager.sockets
        default = () if handed else (f":{PORT}",)
        bound = (each for address in self._options.listen_addresses or default for each in server.listen(address))
        return [*handed, *(opened.enter_context(each) for each in bound)]

    async def _warm_up(self) -> None:
        """The first cycle starts the workers and binds the fleets, so that the first scrape finds both done."""
        first = asyncio.create_task(self._cycle())
        await asyncio.wait([first], timeout=_READY_SECONDS)
        self._started = True
        self._manager.ready()
        await first

    async def _cycle(self) -> None:
        await self._host.snapshot()
        self.ready = True

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._spawn(self._reload_on_signal()))

    async def _reload_on_signal(self) -> None:
        try:
            await self.reload()
        except ExporterError:
            return  # logged, and visible in the reload series

    def _stop(self) -> None:
        if self._stopping.is_set():
            self._host.sampler.kill()
            os._exit(1)
        log.info("stopping")
        self._manager.stopping()
        self._stopping.set()
