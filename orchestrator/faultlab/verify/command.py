"""Proves on your own configuration that its training can be resumed, or says what is in the way: `python -m orchestrator.verify
CONFIG [key=value ...]`.

Shortened to a few steps, the run is made twice undisturbed, once with a process killed after a checkpoint, once stopped half-way
and gone on with on fewer hosts, and once more along that lineage. Samples, parameters and optimizer state are compared bit for
bit. Where they differ, it says which part is at fault: the data, the step, or what is not restored. Exit status 1 if so.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.hosts.config import devices_per_host, num_hosts
from gangway.config.yaml_source import shown_override
from gangway.first_line import say
from gangway.program import Parser, command
from gangway.storage import documents, json_text, ours
from gangway.storage.opening import place_of
from gangway.storage.store import Place
from orchestrator.config.job import ConfigError, JobConfig, load
from orchestrator.faultlab.testbed.live_run import Run, RunError, step_of
from orchestrator.faultlab.verify.compare import (
    Evidence,
    Finding,
    changed_data,
    judge_replayed,
    judge_resized,
    judge_resumed,
    judge_twice,
    passed,
)
from orchestrator.tracking.spool import SPOOL
from trainers.console.text import plain_console

REPORT = "verify.json"
TRIAL = ours.with_any_of("the folder of an earlier verify", REPORT)
RUN = ours.named("a run of this verify", "undisturbed|again|killed|resized|replayed")
EXIT_STOPPED = 3
"""Of orchestrator.run: stopped on request, state saved."""


@command(failures=(ConfigError, RunError))
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    say(f"reading {arguments.config}")
    console = plain_console()
    trial = Trial(arguments, console)
    findings = trial.run()
    show(findings, console)
    good = passed(findings)
    report = {
        "passed": good,
        "config": arguments.config,
        "overrides": [*map(shown_override, arguments.overrides)],
        "steps": arguments.steps,
    }
    documents.write_json(trial.folder / REPORT, {**report, "findings": [asdict(finding) for finding in findings]})
    print(f"written to {trial.folder / REPORT}")
    if good:
        trial.remove_runs()
    return 0 if good else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("orchestrator.verify", __doc__.partition("\n\n")[2], example="config.yaml --steps 20")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=40, help="how many steps each run takes (default: 40)")
    parser.add_argument("--tolerance", type=float, default=0.02, help="of the loss on fewer hosts, relative (default: 0.02)")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.steps < 8:
        parser.error(f"--steps {arguments.steps}: expected at least 8")
    return arguments


class Trial:
    """The runs of one configuration, in the folder NAME-verify of its storage."""

    def __init__(self, arguments: argparse.Namespace, console: Console):
        self.config_path, self.overrides, self.console = arguments.config, [*arguments.overrides], console
        self.steps, self.tolerance = arguments.steps, arguments.tolerance
        self.config = load(self.config_path, self.overrides)
        self.folder = place_of(f"{self.config.run_dir}-verify")
        self.data: Mapping[str, Any] = {}
        """What the first of the runs has learned from."""
        if documents.exists(self.folder) and not (self.folder / REPORT).exists():
            raise RunError(f"{self.folder} is in the way, and not of an earlier verify: remove it, or set name= or storage=")
        delete(self.folder, TRIAL)
        # Marks the folder as ours at once: after an interrupt, the next verify may delete it.
        documents.write_json(self.folder / REPORT, {"passed": None})
        training = self.config.training
        self.where = {"dataset": training.data.dataset, "task": training.task, "trainer": training.trainer}

    def run(self) -> list[Finding]:
        """Stops at the first that is wrong with data or step: what follows would only show it again."""
        plain = self._evidence("undisturbed")
        check_evidence(plain, self.where["trainer"])
        findings = [judge_twice(plain, self._evidence("again"), self.where)]
        if findings[0].good:
            # The save half-way waits for the one before it: so that one is complete when the process is killed.
            killed = self._evidence("killed", ("kill", self.steps // 2 + 1))
            findings.append(judge_resumed(plain, killed, self.where))
        if not passed(findings):
            return [*findings, Finding("the remaining runs", None, "not made: they would show the same again")]
        return [*findings, *self._resize(plain)]

    def remove_runs(self) -> None:
        for name in place_of(self.folder).folders():
            if RUN.is_on(self.folder / name):
                delete(self.folder / name, RUN)

    def _resize(self, plain: Evidence) -> list[Finding]:
        hosts, why_not = fewer_hosts(self.config)
        if hosts is None:
            return [Finding("gone on with on fewer hosts", None, f"not tried: {why_not}")]
        go_on = [f"hosts.count={hosts}", "hosts.min=null", "hosts.max=null"]
        resized = self._evidence("resized", ("stop", self.steps // 2 - 1), go_on)
        findings = [judge_resized(plain, resized, self.tolerance, self.where)]
        lineage = {name: resized.summary[name] for name in ("lineage", "skipped_batches")}
        documents.write_json(self.folder / "lineage.json", lineage)
        again = self._evidence("replayed", more=[f"driver.replay={(self.folder / 'lineage.json').url}"])
        return [*findings, judge_replayed(resized, again, self.where)]

    def _evidence(
        self,
        name: str,
        order: tuple[str, int] | None = None,
        go_on: Sequence[str] | None = None,
        more: Sequence[str] = (),
    ) -> Evidence:
        """Makes a run. `order`: what befalls it, and at which step; `go_on`: it stops then, and goes on with these overrides."""
        with tempfile.TemporaryDirectory(prefix="gangway-verify-") as orders:
            own = [*self.overrides, *shortened(self.steps), f"storage={self.folder.url}", f"name={name}", *more]
            run = Run(self.config_path, own, (self.folder / name).url, Path(orders))
            run.record_batches()
            if order is not None:
                run.order(0, order[0], at=order[1])
            try:
                with self.console.status(f"{name}: {self.steps} steps"):
                    run.start()
                    if run.finish() == EXIT_STOPPED and go_on is not None:
                        run.start(*go_on)
                        run.finish()
            finally:
                run.clean_up()
            evidence = read_evidence(run, self.steps)
        self.data = self.data or evidence.data
        if changed := changed_data(self.data, evidence.data):
            raise RunError(
                f"the data of this job changed while it was verified ({changed}): its runs prove nothing; try again where nobody "
                "writes to them"
            )
        return evidence


def shortened(steps: int) -> list[str]:
    """A quarter of the steps lies between two checkpoints. Schedules that end with the run end with this one."""
    return [
        f"max_num_steps={steps}",
        "max_num_data_epochs=null",
        "time_limit=null",
        f"publish_every_steps={max(1, steps // 8)}",
        "publish_every_epochs=null",
        f"checkpoint.save_steps={steps // 4}",
        "checkpoint.save_epochs=null",
        "checkpoint.save_after_step=0",
        "checkpoint.save_after_epochs=0",
        "checkpoint.save_minutes=null",
        "checkpoint.save_at_end=true",
        f"checkpoint.save_total_limit={steps}",
        "evaluation.at_start=false",
        "evaluation.every_steps=null",
        "evaluation.every_epochs=null",
        "evaluation.score=null",
        "checkpoint.keep_best=null",
        "checkpoint.keep_model_only=none",
        "evaluation.max_batches=1",
        "previews.prompts=[]",
        "tracking.mlflow=false",
    ]


def fewer_hosts(config: JobConfig) -> tuple[int | None, str]:
    """(the greatest smaller number of hosts that the mesh and the batch fit, "") or (None, why there is none)."""
    most = num_hosts(config.hosts)
    if config.hosts.kind == "tpu":
        return None, "TPU hosts come in whole slices"
    if most == 1:
        return None, "the configuration has one host; try it with hosts.count=2"
    for hosts in range(most - 1, 0, -1):
        try:
            config.training.check_devices(hosts * devices_per_host(config.hosts))
        except ValueError:
            continue
        return hosts, ""
    return None, f"mesh and batch fit no number of hosts below {most}"


def read_evidence(run: Run, steps: int) -> Evidence:
    """Raises RunError if the run did not finish."""
    summary = run.summary()
    if summary["status"] != "finished":
        raise RunError(f"the run {run.run_dir.name!r} {summary['status']}: {summary['error'] or summary['stop_reason']}")
    metas = {step_of(path): documents.read_json(path / "meta.json") for path in run.checkpoints()}
    fingerprints = {step: meta["fingerprints"] for step, meta in metas.items() if meta}
    # Batches that were only drawn ahead of the end were not trained on.
    batches = {batch: rows for batch, rows in run.batches().items() if batch < steps}
    last = metas[max(metas)] if metas else None
    return Evidence(batches, fingerprints, read_losses(run.tracking() / SPOOL), summary, (last or {}).get("data") or {})


def read_losses(path: Path) -> dict[int, float]:
    losses: dict[int, float] = {}
    for line in (json_text.show_not_finite(json.loads(line)) for line in path.read_text().splitlines() if line.strip()):
        if "go_back" in line:  # from there on training has taken another course
            losses = {step: loss for step, loss in losses.items() if step <= line["go_back"]}
        if "loss" in line.get("metrics", {}):
            losses[line["step"]] = line["metrics"]["loss"]
    return losses


def check_evidence(evidence: Evidence, trainer: str) -> None:
    if not evidence.fingerprints or not evidence.batches:
        raise RunError(
            f"trainer = {trainer} leaves no fingerprints of its state or takes no callbacks: verify can compare trainers that "
            "are built on trainers.base:BaseTrainer"
        )


def delete(folder: Place, mark: ours.Mark) -> None:
    """Deletes a folder with all that is in it, if there is one. Raises NotOursError if it lacks the mark, and OSError."""
    if folder.is_dir():
        ours.delete_folder(folder, mark)


def show(findings: Sequence[Finding], console: Console) -> None:
    for finding in findings:
        sign, style = {True: ("✓", "green"), False: ("✗", "red"), None: ("-", "yellow")}[finding.good]
        console.print(f"  {sign} {finding.claim}", style=style, highlight=False)
        if finding.text:
            console.print(f"      {finding.text}", highlight=False)
