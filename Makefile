# `make demo` and `make test` need Python 3.11 or later, and `make test` a C compiler; everything else is set up in .venv.
# `make install` and `make uninstall` take PREFIX and DESTDIR, and PYTHON where it is to be another than the system's.
INSTALL_PYTHON := $(PYTHON)
PYTHON ?= python3
VENV ?= .venv
ADDRESS ?= 127.0.0.1:10420
CONFIG ?=
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

PREFIX ?= /usr/local
DESTDIR ?=
NAME := gpu-fleet-exporter
override PREFIX := $(patsubst %/,%,$(PREFIX))
LIBRARY := $(PREFIX)/lib/$(NAME)
# systemd looks for units in these folders alone.
LOOKED_IN := $(filter /usr /usr/local,$(PREFIX))
UNIT_DIR ?= $(if $(LOOKED_IN),$(PREFIX)/lib,/etc)/systemd/system
SYSUSERS_DIR ?= $(if $(LOOKED_IN),$(PREFIX)/lib,/etc)/sysusers.d
SETTINGS := $(DESTDIR)/etc/$(NAME)/config.yaml
# What a running system has to hear about; an installation into a folder that is packed up is nobody's yet.
LIVE := $(if $(DESTDIR),false,test -d /run/systemd/system)

.PHONY: demo run test lint format bench soak docs pictures cluster clean install uninstall deb

demo: $(VENV)/.installed
	@echo "A simulated host with four cards. Open http://$(ADDRESS)/, and stop with Control-C."
	@exec $(BIN)/gpu-fleet-exporter --config.file=docs/demo.yaml --web.listen-address=$(ADDRESS)

run: $(VENV)/.installed-all
	@exec $(BIN)/gpu-fleet-exporter $(if $(CONFIG),--config.file=$(CONFIG)) --web.listen-address=$(ADDRESS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# What a scrape costs beside other exporters; writes the figures down. Minutes, on a machine with nothing else to do. Needs a C
# compiler, and valgrind for the count of instructions.
bench: $(VENV)/.installed-bench
	$(BIN)/python -m tests.bench --output docs/performance.md

# The daemon under random faults, and twenty scrapes a second, for ten minutes.
soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.soak

docs: $(VENV)/.installed-dev
	$(BIN)/python -m tests.metrics_page > docs/metrics.md
	$(BIN)/python -m tests.migration_page > docs/migration.md
	$(BIN)/python -m tests.masks_page
	$(BIN)/python -m tests.runbook_page
	$(BIN)/python -m tests.schema_page > docs/fleets.schema.json
	$(BIN)/python -m grafana.source

# The exporter's page, and the dashboards as Grafana's own components draw them, from six minutes of `make demo`. Needs
# prometheus, chromium and npm.
pictures: $(VENV)/.installed-dev
	$(BIN)/python -m tests.page_pictures
	$(BIN)/python -m tests.pictures

# 250 and then 500 simulated hosts behind one process, scraped by a real Prometheus, for some minutes; prints figures as those of
# docs/scaling.md. Needs prometheus.
cluster: $(VENV)/.installed-dev
	$(BIN)/python -m tests.cluster --hosts 250 500 --minutes 2

install:
	PYTHON='$(INSTALL_PYTHON)' systemd/install-environment.sh build '$(LIBRARY)' '$(DESTDIR)'
	install -d '$(DESTDIR)$(PREFIX)/bin' '$(DESTDIR)$(UNIT_DIR)'
	ln -sfn ../lib/$(NAME)/bin/$(NAME) '$(DESTDIR)$(PREFIX)/bin/$(NAME)'
	sed 's|/usr/local/bin/|$(PREFIX)/bin/|' systemd/$(NAME).service > '$(DESTDIR)$(UNIT_DIR)/$(NAME).service'
	chmod 644 '$(DESTDIR)$(UNIT_DIR)/$(NAME).service'
	install -D -m 644 -t '$(DESTDIR)$(UNIT_DIR)' systemd/$(NAME).socket
	install -D -m 644 systemd/sysusers.conf '$(DESTDIR)$(SYSUSERS_DIR)/$(NAME).conf'
	install -D -m 644 -t '$(DESTDIR)$(PREFIX)/share/$(NAME)' systemd/process-fleets.conf systemd/intel-pmu.conf
	install -D -m 644 -t '$(DESTDIR)$(PREFIX)/share/man/man1' docs/$(NAME).1
	install -D -m 644 -t '$(DESTDIR)$(PREFIX)/share/doc/$(NAME)' README.md CHANGELOG.md config.example.yaml
	install -D -m 644 -t '$(DESTDIR)$(PREFIX)/share/doc/$(NAME)/docs' docs/*.md docs/*.json
	install -D -m 644 -t '$(DESTDIR)$(PREFIX)/share/doc/$(NAME)/docs/pictures' docs/pictures/*.png
	install -D -m 644 -t '$(DESTDIR)$(PREFIX)/share/$(NAME)/prometheus' prometheus/*.yaml prometheus/*.json
	install -D -m 755 -t '$(DESTDIR)$(PREFIX)/share/$(NAME)/prometheus' prometheus/slurm-targets.sh
	install -D -m 644 -t '$(DESTDIR)$(PREFIX)/share/$(NAME)/prometheus/rules' prometheus/rules/*.yaml
	install -D -m 644 -t '$(DESTDIR)$(PREFIX)/share/$(NAME)/grafana/dashboards' grafana/dashboards/*.json
	for kind in datasources dashboards; do \
	  install -D -m 644 -t '$(DESTDIR)$(PREFIX)/share/$(NAME)/grafana/provisioning'/$$kind grafana/provisioning/$$kind/*.yaml; done
	for part in prometheus grafana; do \
	  rm -rf '$(DESTDIR)$(PREFIX)/share/doc/$(NAME)'/$$part; \
	  ln -s ../../$(NAME)/$$part '$(DESTDIR)$(PREFIX)/share/doc/$(NAME)'/$$part; done
	[ -e '$(SETTINGS)' ] || [ -L '$(SETTINGS)' ] || install -D -m 644 config.example.yaml '$(SETTINGS)'
	systemd/install-environment.sh swap '$(LIBRARY)' '$(DESTDIR)'
	@if $(LIVE); then \
	  systemd-sysusers $(NAME).conf && systemctl daemon-reload && systemctl try-restart $(NAME).service && \
	  echo 'Installed. To start it, now and at each boot: systemctl enable --now $(NAME)'; fi

# Settings, the state folder and the user stay: docs/installation.md says how they go. Units of this name that lie elsewhere are
# another installation's.
uninstall:
	@if $(LIVE); then for unit in $(NAME).socket $(NAME).service; do \
	  if [ "$$(systemctl show --property=FragmentPath --value $$unit)" -ef '$(UNIT_DIR)'/$$unit ]; then \
	    systemctl disable --now $$unit; fi; done; fi
	rm -rf '$(DESTDIR)$(LIBRARY)' '$(DESTDIR)$(LIBRARY).new' '$(DESTDIR)$(LIBRARY).old'
	rm -rf '$(DESTDIR)$(PREFIX)/share/$(NAME)' '$(DESTDIR)$(PREFIX)/share/doc/$(NAME)'
	rm -f '$(DESTDIR)$(PREFIX)/bin/$(NAME)' '$(DESTDIR)$(PREFIX)/share/man/man1/$(NAME).1'
	rm -f '$(DESTDIR)$(UNIT_DIR)/$(NAME).service' '$(DESTDIR)$(UNIT_DIR)/$(NAME).socket'
	rm -f '$(DESTDIR)$(SYSUSERS_DIR)/$(NAME).conf'
	@if $(LIVE); then systemctl daemon-reload; ! systemctl cat $(NAME).service >/dev/null 2>&1 || \
	  echo 'Another installation is left. To start it, now and at each boot: systemctl enable --now $(NAME)'; fi

# Debian's package of this tree, in dist/. Needs build-essential, debhelper and python3-venv.
deb:
	systemd/debian/build-package.sh

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

# A stamp, and not the interpreter, tells a finished environment: one whose making was interrupted is made again.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-all: pyproject.toml | $(VENV)/.created
	$(PIP) --editable '.[all]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: pyproject.toml | $(VENV)/.created
	$(PIP) --editable '.[bench,lint]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-all $(VENV)/.installed-dev

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.created
	$(PIP) --editable '.[test,lint]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-all
