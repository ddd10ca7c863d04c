"""Writes docs/grafana/gangway.json, the dashboard of Grafana, with the builders of grafana-foundation-sdk: `make dashboard`.

The queries name metrics of `orchestrator/tracking/prometheus.py`, and of Ray for the machines. `test_dashboard.py` in
`tests/unit/orchestrator/tracking` checks them without the library, `tests/ray/test_dashboard.py` with a Prometheus and a run.
"""

from __future__ import annotations

import itertools
from typing import Any

from grafana_foundation_sdk.builders import bargauge, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import ReduceDataOptions, VizLegendOptions, VizTooltipOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableOption, VariableRefresh, VariableSort

from tests import ROOT

PAGE = ROOT / "docs" / "grafana" / "gangway.json"
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
OF_RUN = 'run=~"$run",SessionName=~"$session"'
OF_GOOGLE = 'workload_id=~"$run",SessionName=~"$session"'
OF_MACHINES = 'SessionName=~"$session"'
NEWEST = ReduceDataOptions().calcs(["lastNotNull"]).values(False)
NOT_THERE = "not known"
PRODUCTIVE = "Share of the wall clock in steps that counted"
OF_PEAK = "Model FLOPs over the peak of the devices"
Query = tuple[str, str]
"""The expression, and what its lines are called."""


def of_run(metric: str, *labels: str, where: str = OF_RUN, by: str = "run") -> str:
    """Returns the newest value of each run: for some seconds there are two, after the driver was replaced."""
    return f"max by ({', '.join((by, *labels))}) (ray_{metric}{{{where}}})"


def over_time(category: str) -> str:
    """Returns the share of a category of the ledger in the newest `$window`."""
    spent = f"sum by (run) (delta(ray_gangway_time_seconds{{{OF_RUN},category={category}}}[$window]))"
    return f"{spent} / sum by (run) (delta(ray_gangway_time_seconds{{{OF_RUN}}}[$window]))"


def filled(panel: Any, title: str, text: str, unit: str, queries: tuple[Query, ...], span: int, height: int) -> Any:
    instant = not isinstance(panel, timeseries.Panel)
    panel = panel.title(title).description(text).unit(unit).datasource(SOURCE).span(span).height(height).no_value(NOT_THERE)
    for letter, (expression, legend) in zip("ABCD", queries, strict=False):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(letter).datasource(SOURCE)
        panel = panel.with_target(query.instant() if instant else query.range())
    return panel


def number(title: str, text: str, unit: str, query: Query, mode: common.BigValueTextMode, decimals: int | None = None) -> Any:
    panel = filled(stat.Panel(), title, text, unit, (query,), span=3, height=4)
    panel = (
        panel.graph_mode(common.BigValueGraphMode.NONE)
        .color_mode(common.BigValueColorMode.NONE)
        .text_mode(mode)
        .reduce_options(NEWEST)
    )
    return panel if decimals is None else panel.decimals(decimals)


def value(title: str, text: str, unit: str, expression: str, legend: str = "{{run}}", decimals: int | None = None) -> Any:
    return number(title, text, unit, (expression, legend), common.BigValueTextMode.AUTO, decimals)


def lines(title: str, text: str, unit: str, *queries: Query, at_most: float | None = None) -> Any:
    panel = filled(timeseries.Panel(), title, text, unit, queries, span=12, height=8).line_width(2).fill_opacity(0)
    legend = VizLegendOptions().display_mode(common.LegendDisplayMode.LIST).show_legend(True)
    legend = legend.placement(common.LegendPlacement.BOTTOM)
    panel = panel.legend(legend).tooltip(VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    return panel if at_most is None else panel.min(0).max(at_most)


def bars(title: str, text: str, unit: str, query: Query) -> Any:
    panel = filled(bargauge.Panel(), title, text, unit, (query,), span=12, height=8)
    panel = panel.orientation(common.VizOrientation.HORIZONTAL).display_mode(common.BarGaugeDisplayMode.BASIC)
    return panel.reduce_options(NEWEST)


def numbers() -> list[Any]:
    left = f"{of_run('gangway_step')} / {of_run('gangway_max_steps')}"
    return [
        number(
            "State",
            "What the run is doing",
            "none",
            (f"{of_run('gangway_state', 'state')} == 1", "{{state}}"),
            common.BigValueTextMode.NAME,
        ),
        value("Step", "Optimizer steps completed", "none", of_run("gangway_step"), decimals=0),
        value("Of all steps", "Steps completed over the steps wanted", "percentunit", left, decimals=1),
        value("Goodput", PRODUCTIVE, "percentunit", of_run("gangway_goodput_ratio"), decimals=1),
        value("Speed", "Tokens trained on in a second", "suffix: tokens/s", of_run("gangway_tokens_per_second"), decimals=0),
        value("MFU", OF_PEAK, "percentunit", of_run("gangway_mfu_ratio"), decimals=1),
        value("Hosts", "Hosts of the gang", "none", of_run("gangway_hosts"), decimals=0),
        value(
            "Restarts",
            "Restarts of the gang, in all launches",
            "none",
            of_run("workload_disruptions", where=OF_GOOGLE, by="workload_id"),
            "{{workload_id}}",
            decimals=0,
        ),
    ]


def of_training() -> list[Any]:
    loss = (of_run("gangway_loss"), "{{run}}: training"), (of_run("gangway_eval_loss"), "{{run}}: held out")
    return [
        lines("Loss", "Mean of an interval, and of the held-out data", "suffix: nats", *loss),
        lines("Speed", "Tokens trained on in a second", "suffix: tokens/s", (of_run("gangway_tokens_per_second"), "{{run}}")),
        lines("Steps", "A restart goes back to the checkpoint", "suffix: steps",
              (of_run("gangway_step"), "{{run}}: trained"), (of_run("gangway_checkpoint_step"), "{{run}}: saved")),
        lines("MFU", OF_PEAK, "percentunit", (of_run("gangway_mfu_ratio"), "{{run}}"), at_most=1),
        lines("Learning rate", "Of the newest step", "sci", (of_run("gangway_learning_rate"), "{{run}}")),
        lines("Norm of the gradient", "Before clipping", "none", (of_run("gangway_grad_norm"), "{{run}}")),
    ]  # fmt: skip


def of_goodput() -> list[Any]:
    sources = of_run("workload_badput_time", "badput_source", where=OF_GOOGLE, by="workload_id")
    lost = of_run("gangway_time_seconds", "category", where=f'{OF_RUN},category!="step"')
    return [
        lines("Goodput", PRODUCTIVE, "percentunit",
              (of_run("gangway_goodput_ratio"), "{{run}}: so far"), (over_time('"step"'), "{{run}}: newest $window"), at_most=1),
        lines("Wait for data", "Share of the wall clock in which training waited for a batch", "percentunit",
              (over_time('"data_wait"'), "{{run}}: newest $window"), at_most=1),
        bars("Lost time by cause", "Wall clock of all launches by category of the goodput ledger", "s",
             (f"sort_desc({lost})", "{{run}}: {{category}}")),
        bars("Lost time by Google's names", "As ml-goodput-measurement calls it", "s",
             (f"sort_desc({sources})", "{{workload_id}}: {{badput_source}}")),
        lines("Incidents", "Failures, resizes and anomalies so far, by kind", "none",
              (of_run("gangway_incidents_total", "kind"), "{{run}}: {{kind}}")),
        lines("Hosts", "Hosts of the gang", "none", (of_run("gangway_hosts"), "{{run}}")),
    ]  # fmt: skip


def of_hosts() -> list[Any]:
    used = f"{of_run('gangway_host_memory_bytes', 'host')} / {of_run('gangway_host_memory_total_bytes', 'host')}"
    device = (
        (of_run("gangway_device_memory_bytes"), "{{run}}: now"),
        (of_run("gangway_device_memory_peak_bytes"), "{{run}}: at most"),
    )
    return [
        lines("Time of a step by host", "Time that the host works at a step, without waits for others", "s",
              (of_run("gangway_host_step_seconds", "host"), "{{run}}: host {{host}}"),
              (of_run("gangway_step_seconds"), "{{run}}: wall time")),
        lines("Memory of the devices", "Of the fullest device of host 0; processors do not count theirs", "bytes", *device),
        lines("Memory of the machines", "In use, of all", "percentunit", (used, "{{run}}: host {{host}}"), at_most=1),
        lines("Memory of the training processes", "Resident", "bytes",
              (of_run("gangway_process_memory_bytes", "host"), "{{run}}: host {{host}}")),
        lines("Processors of the machines", "CPU time in use, of that of all cores", "percentunit",
              (of_run("gangway_host_cpu_ratio", "host"), "{{run}}: host {{host}}"), at_most=1),
    ]  # fmt: skip


def of_machines() -> list[Any]:
    def of(metric: str) -> str:
        return f"max by (ip) (ray_node_{metric}{{{OF_MACHINES}}})"

    disk = f"{of('disk_usage')} / ({of('disk_usage')} + {of('disk_free')})"
    return [
        lines("Processors", "All nodes of the Ray cluster, as Ray measures them", "percent", (of("cpu_utilization"), "{{ip}}")),
        lines("Memory", "In use, of all", "percentunit", (f"{of('mem_used')} / {of('mem_total')}", "{{ip}}"), at_most=1),
        lines("Disk", "In use, of all", "percentunit", (disk, "{{ip}}"), at_most=1),
        lines("Network", "Of the whole machine", "Bps",
              (of("network_receive_speed"), "{{ip}}: received"), (of("network_send_speed"), "{{ip}}: sent")),
    ]  # fmt: skip


ROWS = (
    ("Run", numbers),
    ("Training", of_training),
    ("Goodput and incidents", of_goodput),
    ("Hosts of the run", of_hosts),
    ("Machines of the cluster", of_machines),
)


def choice(name: str, label: str, query: str) -> Any:
    everything = VariableOption(selected=True, text="All", value="$__all")
    variable = (
        dashboard.QueryVariable(name).label(label).query(query).datasource(SOURCE).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    )
    return variable.sort(VariableSort.ALPHABETICAL_ASC).multi(True).include_all(True).all_value(".*").current(everything)


def build() -> Any:
    made = (
        dashboard.Dashboard("Gangway")
        .uid("gangway")
        .tags(["gangway", "ray"])
        .description("Runs of gangway, through Ray's metrics")
    )
    made = made.time("now-1h", "now").refresh("10s").timezone("browser").editable()
    made = made.with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
    made = made.with_variable(choice("session", "Ray session", "label_values(ray_gangway_step, SessionName)"))
    made = made.with_variable(choice("run", "Run", 'label_values(ray_gangway_step{SessionName=~"$session"}, run)'))
    made = made.with_variable(dashboard.IntervalVariable("window").label("Rolling over").values("1m,10m,1h,6h,1d")
                              .current(VariableOption(selected=True, text="10m", value="10m")))  # fmt: skip
    ids = itertools.count(1)
    for title, panels in ROWS:
        made = made.with_row(dashboard.Row(title).id(next(ids)))
        for panel in panels():
            made = made.with_panel(panel.id(next(ids)))
    return made.build()


if __name__ == "__main__":
    PAGE.write_text(JSONEncoder(sort_keys=True, indent=1).encode(build()) + "\n")
