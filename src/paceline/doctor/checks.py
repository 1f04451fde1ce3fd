"""All checks, in the order in which they are told: each is a function from the survey to one line and its findings."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor import checks_hosts, checks_network, checks_training
from paceline.doctor.judged import Check
from paceline.doctor.survey import Survey


def judge(survey: Survey) -> list[Check]:
    """What is right and what is wrong."""
    return list(_checks(survey))


def _checks(survey: Survey) -> Iterator[Check]:
    several = len(survey.wanted.hosts) > 1
    yield checks_hosts.logins(survey)
    if not survey.facts:
        return
    yield checks_hosts.software(survey)
    yield checks_hosts.resources(survey)
    if any(one.gpus for one in survey.facts.values()):
        yield checks_hosts.gpus(survey)
    if several:
        yield checks_network.names(survey)
        yield checks_network.pairs(survey)
        yield checks_network.interfaces(survey)
        yield checks_hosts.clocks(survey)
    yield checks_training.run_folder(survey)
    yield checks_training.room(survey)
    if survey.wanted.quick:
        return
    yield checks_training.data(survey)
    if several:
        yield checks_network.links(survey)
    yield checks_training.gradients(survey)
