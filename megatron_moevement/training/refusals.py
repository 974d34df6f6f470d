# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron-LM that are no settings here: accepted, or refused for a feature.

All that is refused is told at once, by feature: it would not work here, or it would break the
promise that every recovery ends with the bits of the fault-free run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.config_fields import (
    config_fields,
    latent_attention_fields,
)
from megatron_moevement.settings.parser import Parser
from megatron_moevement.training.megatron_flags import ALIASES, AS_IT_IS, FEATURES, WITHOUT_EFFECT


@dataclasses.dataclass(frozen=True)
class Answer:
    """What becomes of a flag that is no setting here.

    Attributes:
        as_it_is: values that say what is the case; "" is the flag without a value.
        feature: what other values ask for; None: they are none of the flag's.
        has_effect: whether there is anything for its values to choose.
        only_tunes: whether there is only where something else asks for the feature.
    """

    as_it_is: tuple[str, ...] = ()
    feature: str | None = None
    has_effect: bool = True
    only_tunes: bool = False


def answer(flag: str) -> Answer | None:
    """Returns what becomes of a flag that is no setting here; None: Megatron-LM has no such."""
    plain, negated = _spellings(flag)
    if _named(negated, WITHOUT_EFFECT) or _named(plain, WITHOUT_EFFECT):
        return Answer(has_effect=False)
    as_it_is = (*AS_IT_IS.get(negated, ()), *_defaults().get(flag, ()))
    name = _named(negated, _FEATURE_OF) or _named(plain, _FEATURE_OF) or ""
    feature = _FEATURE_OF.get(name)
    tunes = feature is not None and name in FEATURES[feature].tuning.split()
    if feature is None and flag in _latent_attention_flags():
        feature, tunes = "multi-latent attention", True
    return Answer(as_it_is, feature, only_tunes=tunes) if feature or as_it_is else None


def _spellings(flag: str) -> tuple[str, str]:
    """Returns a flag without a negation, and with the usual one: Megatron-LM has two."""
    for negation in ("--no-", "--disable-"):
        if flag.startswith(negation):
            words = flag.removeprefix(negation)
            return f"--{words}", f"--no-{words}"
    return flag, flag


def _named(flag: str, names: Collection[str]) -> str | None:
    """Returns which of the names stands for a flag: the flag, or its longest beginning."""
    ends = [place + 1 for place, letter in enumerate(flag) if letter == "-" and place > 1]
    return next((one for one in (flag, *(flag[:end] for end in ends[::-1])) if one in names), None)


_FEATURE_OF: Mapping[str, str] = {
    flag: name
    for name, feature in FEATURES.items()
    for flag in (*feature.flags.split(), *feature.tuning.split())
}


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A command line without what is no setting here.

    Attributes:
        rest: its settings, and what nobody knows.
        without_effect: the flags without an effect that were given.
        refused: what is asked for and not covered, by feature.
    """

    rest: tuple[str, ...]
    without_effect: tuple[str, ...]
    refused: Mapping[str, tuple[str, ...]]


def resolve(argv: Sequence[str], settings: Collection[str]) -> Resolved:
    """Takes out of a command line what is no setting here.

    Args:
        settings: the flags that are.
    """
    words = [other for word in argv for other in _in_our_words(word, settings)]
    answers = {
        flag: found
        for flag in _flags_in(words)
        if flag not in settings and (found := answer(flag)) is not None
    }
    given, rest = _take(words, answers)
    given = _last_of_each(given)
    without = [flag for flag, _ in given if not answers[flag].has_effect]
    refused: dict[str, list[str]] = {}
    tuned: dict[str, list[str]] = {}
    for flag, value in given:
        found = answers[flag]
        if not found.has_effect or _is_the_case(value, found.as_it_is):
            continue
        if found.feature is None:
            rest += value.split()  # nobody knows them
        else:
            asking = tuned if found.only_tunes else refused
            asking.setdefault(found.feature, []).append(f"{flag} {value}".strip())
    for name, feature in FEATURES.items():
        named = _take(rest, feature.values)[0]
        for flag, values in _last_of_each(named):
            if [one for one, _ in named].count(flag) > 1:  # its choices would refuse the others
                rest = [*_take(rest, {flag})[1], flag, *values.split()]
            asked = [one for one in values.split() if one in feature.values[flag].split()]
            if asked:
                refused.setdefault(name, []).append(" ".join((flag, *asked)))
                rest = _take(rest, {flag})[1]  # its choices would refuse it again
    for name, flags in tuned.items():
        if name in refused:
            refused[name] += flags
        else:
            without += (flag.partition(" ")[0] for flag in flags)
    found_in = {feature: tuple(dict.fromkeys(flags)) for feature, flags in refused.items()}
    return Resolved(tuple(rest), tuple(dict.fromkeys(without)), found_in)


def check_covered(resolved: Resolved, parser: Parser) -> None:
    """Checks that a command line asks for nothing that is not covered.

    Args:
        parser: of the settings.

    Raises:
        UserError: it does; all is told at once, flags that nobody knows included.
    """
    if not resolved.refused:
        return
    parts = [
        f"{name} ({', '.join(resolved.refused[name])}): {feature.reason}"
        for name, feature in FEATURES.items()
        if name in resolved.refused
    ]
    unknown = [flag for flag in _flags_in(resolved.rest) if flag not in parser.flags]
    if unknown:
        parts.append(f"unknown flags ({', '.join(unknown)}): see --help{parser.proposal(unknown)}")
    raise UserError("not supported: " + "; ".join(parts))


def _in_our_words(word: str, settings: Collection[str]) -> tuple[str, ...]:
    flag, equals, value = word.partition("=")
    negated = _spellings(flag)[1]
    if flag not in settings and negated in settings:
        return (negated,)
    first, *rest = ALIASES.get(flag, (flag,))
    return (first + equals + value, *rest)


def _flags_in(words: Iterable[str]) -> list[str]:
    flags = (word.partition("=")[0] for word in words if word.startswith("--"))
    return list(dict.fromkeys(flags))


def _take(words: Sequence[str], flags: Collection[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns the flags among words with their values, and the other words."""
    taken, rest = _taker(frozenset(flags)).parse_known_args(words)
    return taken.given, rest


def _last_of_each(given: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns flags with the values that count where a script overrides what it gave before."""
    return list(dict(given).items())


def _is_the_case(value: str, as_it_is: Collection[str]) -> bool:
    return value in as_it_is or (
        (number := _number(value)) is not None and number in map(_number, as_it_is)
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@functools.cache
def _taker(flags: frozenset[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.set_defaults(given=[])
    for flag in sorted(flags):
        parser.add_argument(flag, action=_Given, nargs="*", dest="given")
    return parser


class _Given(argparse.Action):
    """Notes a flag with its values, in the order of the command line."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option: object = None
    ) -> None:
        assert isinstance(values, list)
        setattr(namespace, self.dest, [*namespace.given, (option, " ".join(values))])


@functools.cache
def _defaults() -> Mapping[str, tuple[str, ...]]:
    """Returns by flag of a field the value that changes nothing; one that is `bool` has none."""
    return {
        flag: () if field.kind is bool or field.default is None else (str(field.default),)
        for field in config_fields().values()
        for flag in field.flags
    }


@functools.cache
def _latent_attention_flags() -> frozenset[str]:
    return frozenset(flag for one in latent_attention_fields().values() for flag in one.flags)
