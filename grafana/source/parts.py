"""What the dashboards are built of: panels with the house's defaults, cells, links, variables."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from grafana_foundation_sdk.builders import bargauge, common, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus as query
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as enums
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from exporter import catalog
from grafana.source.queries import CHOSEN, of

TAG = "gpu-fleet-exporter"
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")

GOOD, NOTE, BAD, WORST = "green", "blue", "orange", "red"

Panel = TypeVar("Panel", stat.Panel, table.Panel, timeseries.Panel, statetimeline.Panel, bargauge.Panel)


class Uid(NamedTuple):
    """The dashboards' uids: links between them, bookmarks and provisioning rest on these."""

    fleets: str = "gpu-fleet-fleets"
    hosts: str = "gpu-fleet-hosts"
    mapping: str = "gpu-fleet-mapping"
    cluster: str = "gpu-fleet-cluster"


UID = Uid()


def named(panel: Panel, title: str, description: str, absent: str, size: tuple[int, int]) -> Panel:
    """What every panel has: its title, what it shows, what it says where there is nothing, and its width and height."""
    return panel.title(title).description(description).datasource(SOURCE).no_value(absent).span(size[0]).height(size[1])


def asked(panel: Panel, *queries: query.Dataquery) -> Panel:
    """The panel's queries, lettered in this order."""
    for letter, one in zip(string.ascii_uppercase, queries, strict=False):
        panel.with_target(one.ref_id(letter).datasource(SOURCE))
    return panel


def over_time(expression: str, legend: str) -> query.Dataquery:
    """Lines over the dashboard's time."""
    return query.Dataquery().expr(expression).legend_format(legend).range()


def now(expression: str, legend: str) -> query.Dataquery:
    """Values at the end of the dashboard's time."""
    return query.Dataquery().expr(expression).legend_format(legend).instant()


def rows(expression: str) -> query.Dataquery:
    """Rows of a table at the end of the dashboard's time, a column for each label."""
    return query.Dataquery().expr(expression).format(PromQueryFormat.TABLE).instant()


def beside(*expressions: str) -> list[query.Dataquery]:
    """Queries of one table of devices. Grafana joins their rows by the columns that all of them have. So each has the
    part, which the row of a whole card lacks by itself: else a card's reading may come to stand beside its part.
    """
    return [rows(f'label_replace({one}, "gpu_partition", "whole", "gpu_partition", "")') for one in expressions]


def steps(*colours: tuple[float | None, str]) -> build.ThresholdsConfig:
    """From which value on which colour; the first value is None."""
    marks = [model.Threshold(value=value, color=colour) for value, colour in colours]
    return build.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(marks)


Colours = tuple[tuple[float | None, str], ...]
"""From which value on which colour: what :func:`steps` takes."""

HOT = ((None, GOOD), (75.0, BAD), (87.0, WORST))
FULL = ((None, GOOD), (90.0, BAD), (97.0, WORST))
NONE_WANTED = ((None, GOOD), (1.0, WORST))
PLAIN = ((None, NOTE),)


def texts(**of_value: tuple[str, str]) -> list[model.ValueMapping]:
    """What a value is shown as, and in which colour; ``_1`` is the value 1."""
    return [mapping({value.removeprefix("_"): shown for value, shown in of_value.items()})]


def mapping(of_value: Mapping[str, tuple[str, str | None]]) -> model.ValueMap:
    """As :func:`texts`, of any text."""
    results = {
        value: model.ValueMappingResult(text=text, color=colour, index=index)
        for index, (value, (text, colour)) in enumerate(of_value.items())
    }
    return model.ValueMap(options=results)


STATE_TEXTS = texts(_0=("ok", GOOD), _1=("asleep", NOTE), _2=("hung", BAD), _3=("lost", WORST))
INVERTED_TEXTS = texts(_0=("refused", WORST), _1=("inverted", GOOD))
HELD_TEXTS = texts(_0=("free", GOOD), _1=("held down", BAD))
REPAIR_TEXTS = texts(_0=("none", GOOD), _1=("waits for a reset", BAD), _2=("failed", WORST))
UP_TEXTS = texts(_0=("down", WORST), _1=("up", GOOD))


def number(unit: str, colours: Colours) -> stat.Panel:
    """Values as large numbers with the colour of where they lie."""
    return (
        stat.Panel()
        .unit(unit)
        .thresholds(steps(*colours))
        .color_scheme(build.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .color_mode(enums.BigValueColorMode.BACKGROUND)
        .graph_mode(enums.BigValueGraphMode.NONE)
        .justify_mode(enums.BigValueJustifyMode.AUTO)
        .text_mode(enums.BigValueTextMode.AUTO)
        .orientation(enums.VizOrientation.AUTO)
    )


def figure(
    title: str,
    expression: str,
    description: str,
    colours: Colours = PLAIN,
    unit: str = "short",
    *,
    absent: str,
    width: int,
) -> stat.Panel:
    """One number."""
    panel = named(number(unit, colours).decimals(0), title, description, absent, (width, 4))
    return asked(panel, now(expression, title))


def lines(unit: str, most: float | None = None) -> timeseries.Panel:
    """Lines from 0 on. A gap stays a gap: what was not measured is not drawn."""
    panel = (
        timeseries.Panel()
        .unit(unit)
        .color_scheme(build.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
        .min(0)
        .line_width(1)
        .fill_opacity(8)
        .span_nulls(False)
        .show_points(enums.VisibilityMode.AUTO)
        .legend(_legend(True).calcs(["last", "max"]))
        .tooltip(_tooltip())
    )
    return panel if most is None else panel.max(most)


def timeline(mappings: list[model.ValueMapping]) -> statetimeline.Panel:
    """A band a series, in the colour of its state."""
    return (
        statetimeline.Panel()
        .unit("none")
        .mappings(mappings)
        .color_scheme(build.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        .thresholds(steps(*PLAIN))
        .show_value(enums.VisibilityMode.AUTO)
        .row_height(0.85)
        .merge_values(True)
        .fill_opacity(80)
        .line_width(0)
        .legend(_legend(False))
        .tooltip(_tooltip())
    )


def _legend(shown: bool) -> common.VizLegendOptions:
    mode = enums.LegendDisplayMode.TABLE if shown else enums.LegendDisplayMode.HIDDEN
    legend = common.VizLegendOptions().display_mode(mode).placement(enums.LegendPlacement.BOTTOM)
    return legend.show_legend(shown).calcs([])


def _tooltip() -> common.VizTooltipOptions:
    return common.VizTooltipOptions().mode(enums.TooltipDisplayMode.MULTI).sort(enums.SortOrder.DESCENDING)


def bars(unit: str, most: float, colours: Colours) -> bargauge.Panel:
    """A bar a value."""
    return (
        bargauge.Panel()
        .unit(unit)
        .min(0)
        .max(most)
        .thresholds(steps(*colours))
        .color_scheme(build.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .orientation(enums.VizOrientation.HORIZONTAL)
        .display_mode(enums.BarGaugeDisplayMode.BASIC)
        .value_mode(enums.BarGaugeValueMode.COLOR)
        .name_placement(enums.BarGaugeNamePlacement.TOP)
        .text(common.VizTextDisplayOptions().title_size(12).value_size(16))
        .sizing(enums.BarGaugeSizing.AUTO)
        .show_unfilled(True)
        .legend(_legend(False))
    )


UNMEASURED = "not measured"


class Column(NamedTuple):
    """One column: what it is called, which label or query (``Value #A``) fills it, and how its cells look."""

    title: str
    field: str
    properties: Mapping[str, object] = {}


def listed(columns: Iterable[Column], order: Iterable[tuple[str, bool]] = ()) -> table.Panel:
    """The queries' rows as one table: rows of equal labels together, these columns and no others, in this order.

    ``order`` is the columns to sort by, and whether from the greatest down.
    """
    columns = tuple(columns)
    panel = (
        table.Panel()
        .unit("none")
        .show_header(True)
        .cell_height(enums.TableCellHeight.SM)
        .filterable(True)
        .sort_by([common.TableSortByFieldState().display_name(name).desc(down) for name, down in order])
        .with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(_only(columns))
    )
    for column in columns:
        # A label that a row lacks is not told by the text for a table without rows.
        absent = {} if column.field.startswith("Value") else {"noValue": "\u2013"}
        if properties := absent | dict(column.properties):
            panel.override_by_name(column.title, _properties(properties))
    return panel


def _only(columns: tuple[Column, ...]) -> model.DataTransformerConfig:
    options = {
        "includeByName": {column.field: True for column in columns},
        "indexByName": {column.field: place for place, column in enumerate(columns)},
        "renameByName": {column.field: column.title for column in columns},
    }
    return model.DataTransformerConfig(id_val="organize", options=options)


def _properties(values: Mapping[str, object]) -> list[model.DynamicConfigValue]:
    return [model.DynamicConfigValue(id_val=name, value=value) for name, value in values.items()]


def share(colours: Colours, unit: str = "percent", most: float = 100) -> dict[str, object]:
    """A cell with a bar, which says so where there is nothing to draw."""
    return {
        "unit": unit,
        "noValue": UNMEASURED,
        "min": 0,
        "max": most,
        "decimals": 0,
        "thresholds": steps(*colours).build(),
        "custom.cellOptions": {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"},
    }


def coloured(mappings: list[model.ValueMapping]) -> dict[str, object]:
    """A cell whose background tells its state."""
    cell = {"type": "color-background", "mode": "basic"}
    return {"mappings": mappings, "custom.cellOptions": cell, "noValue": "not known"}


def over(limit: float, colour: str) -> dict[str, object]:
    """A count whose text has this colour from the limit on; what was not counted is none."""
    marks = steps((None, "text"), (limit, colour)).build()
    return {"thresholds": marks, "custom.cellOptions": {"type": "color-text"}, "noValue": "none"}


def wide(pixels: int, **properties: object) -> dict[str, object]:
    """A cell of this width."""
    return {"custom.width": pixels, **properties}


def to(uid: str, **variables: str) -> dict[str, object]:
    """A cell that leads to another dashboard about what is in it: ``fleet="Fleet"`` takes the column's text."""
    chosen = "".join(f"&var-{name}=${{__data.fields.{column}}}" for name, column in variables.items())
    url = f"/d/{uid}?${{__url_time_range}}&var-datasource=${{datasource}}{chosen}"
    return {"links": [{"title": "Open", "url": url, "targetBlank": False}]}


def dashboard(uid: str, title: str, description: str, *variables: build.QueryVariable) -> build.Dashboard:
    """A dashboard with the choice of jobs, of instances and of these, and with marks where settings were loaded."""
    board = blank(uid, title, description)
    for variable in (*job_and_instance(), *variables):
        board.with_variable(variable)
    return board.annotation(reloads())


def blank(uid: str, title: str, description: str) -> build.Dashboard:
    """A dashboard that leads to the others, with the choice of a data source."""
    others = build.DashboardLink("GPU dashboards").type(model.DashboardLinkType.DASHBOARDS).tags([TAG])
    return (
        build.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG, "gpu"])
        .readonly()
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(others.as_dropdown(False).include_vars(True).keep_time(True).target_blank(False))
        .with_variable(build.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )


def place(board: build.Dashboard, *panels: Builder[model.Panel], row: str = "") -> None:
    """Puts panels after those that are there, below a row of that name if one is given."""
    if row:
        board.with_row(build.Row(row))
    for panel in panels:
        board.with_panel(panel)


def chosen(name: str, family: catalog.Family | str, *matchers: str, within: str = CHOSEN) -> build.QueryVariable:
    """A variable of the values that a label has, all of them unless some are chosen."""
    metric = family if isinstance(family, str) else family.name
    narrowed = ", ".join(filter(None, (within, *matchers)))
    selector = f"{metric}{{{narrowed}}}" if narrowed else metric
    return (
        build.QueryVariable(name)
        .label(name.capitalize())
        .datasource(SOURCE)
        .query(f"label_values({selector}, {name})")
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.NATURAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".+")
        .current(model.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def job_and_instance() -> list[build.QueryVariable]:
    """Which exporters: every one that there is, whatever its job is called."""
    return [
        chosen("job", catalog.BUILD_INFO, within=""),
        chosen("instance", catalog.BUILD_INFO, within='job=~"$job"'),
    ]


def event(name: str, expression: str, colour: str) -> build.AnnotationQuery:
    """A mark in time."""
    return build.AnnotationQuery().name(name).datasource(SOURCE).expr(expression).enable(True).icon_color(colour)


def reloads() -> build.AnnotationQuery:
    """A mark where an exporter loaded its settings."""
    return event("Settings loaded", f"changes({of(catalog.RELOAD_TIMESTAMP)}[$__rate_interval]) > 0", NOTE)
