"""Golden traces: how events and actions are written, and what a scheduler answers to written events."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import numpy as np

from lesonnx.errors import LoadError
from lesonnx.schedule import Action, Cancel, Compute, Evict, LayerShape, Load, SchedulerConfig
from lesonnx.scheduler import Scheduler

FORMAT = 1

ARGUMENTS = {
    "begin_step": ("rows", "drafts"),
    "route": ("layer", "expert_ids"),
    "predict": ("layer", "scores"),
    "loaded": ("expert", "read_us"),
    "load_failed": ("expert",),
    "computed": ("experts",),
    "end_layer": (),
    "accept": ("rows",),
    "pressure": ("budget_bytes",),
}


def write_action(action: Action) -> list[Any]:
    if isinstance(action, Load):
        return ["load", action.expert, "lookahead" if action.lookahead else "demand", action.slab, action.offset_bytes]
    if isinstance(action, Compute):
        return ["compute", *action.experts]
    name = "evict" if isinstance(action, Evict) else "cancel" if isinstance(action, Cancel) else "promote"
    return [name, action.expert]


def write_event(name: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    values = [value.tolist() if isinstance(value, np.ndarray) else value for value in arguments]
    return {"event": name, **dict(zip(ARGUMENTS[name], values, strict=True))}


def end_state(scheduler: Scheduler) -> dict[str, Any]:
    """What is left: the counters, the slabs, and where each loading or resident expert lies."""
    places = []
    for expert in range(scheduler.num_experts):
        if scheduler.state(expert) >= 2:
            places.append([expert, *scheduler.place(expert)])
    return {
        "counters": asdict(scheduler.counters),
        "committed_bytes": scheduler.committed_bytes(),
        "lookahead_level": scheduler.lookahead_level,
        "slabs": [list(slab) for slab in scheduler.slabs()],
        "places": places,
    }


def make_scheduler(trace: dict[str, Any]) -> Scheduler:
    known = {field.name for field in fields(SchedulerConfig)}
    if trace["format"] != FORMAT or set(trace["config"]) != known:
        raise ValueError("a trace of another format: make the golden traces again")
    layers = [LayerShape(**layer) for layer in trace["layers"]]
    return Scheduler(layers, trace["budget_bytes"], SchedulerConfig(**trace["config"]))


def answer(scheduler: Scheduler, event: dict[str, Any]) -> dict[str, Any]:
    """The event with the scheduler's own answer."""
    name = event["event"]
    arguments = [event[key] for key in ARGUMENTS[name]]
    if name == "predict":
        arguments[1] = np.array(arguments[1], np.int32)
    written = {"event": name, **{key: event[key] for key in ARGUMENTS[name]}}
    try:
        actions = getattr(scheduler, name)(*arguments)
    except LoadError:
        return {**written, "error": "load"}
    return {**written, "actions": [write_action(action) for action in actions]}
