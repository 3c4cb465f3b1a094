"""What a component says of itself beyond its call: combinations are judged by what parts do, not by which they are.

| kind | attribute | default | meaning |
|---|---|---|---|
| selector | `reads_scores` | True | chooses by the scores it is given (blind ones never do) |
| selector | `draws` | `never` | leaves tokens of its own in `Step.drawn`: `sampling` (above temperature 0), `always` |
| selector | `attention_layers` | None | reads `Step.attention`, averaged over so many last layers |
| reviser | `replaces` | False | writes other tokens over decided ones |
| stop rule | `at_end_tokens` | False | ends rows at end-of-sequence tokens and nowhere else |
| transform | `normalised` | False | answers probabilities that sum to 1, without the mask id, if it is given such |
| cache policy | `exchangeable` | True | is there for speed: another may take its place |

A component of anyone's states them as attributes of its class or of itself; one made of others names them in `parts`,
and what a part states counts for the whole. The driver refuses components that do what they do not state. Read next:
`strategy.py`.
"""

from __future__ import annotations

from typing import Any


def stated(component: Any, name: str, default: Any) -> list[Any]:
    """What the component and its parts state under this name; [default] if none of them does."""
    own = [getattr(component, name)] if hasattr(component, name) else []
    of_parts = [value for part in getattr(component, "parts", ()) for value in stated(part, name, None)]
    return [value for value in own + of_parts if value is not None] or [default]


def reads_scores(select: Any) -> bool:
    """Whether a score changes what the selector chooses."""
    return not select.blind and any(stated(select, "reads_scores", True))


def draws_itself(select: Any, temperature: float) -> bool:
    """Whether the selector decides which tokens are written at this temperature."""
    return any(how == "always" or (how == "sampling" and temperature > 0) for how in stated(select, "draws", "never"))


def attention_layers(select: Any) -> int | float | None:
    """Of how many last layers the selector reads attention; None: of none."""
    layers: int | float | None = stated(select, "attention_layers", None)[0]
    return layers


def replaces_tokens(revise: Any) -> bool:
    """Whether the reviser (None: there is none) writes tokens over decided ones."""
    return revise is not None and any(stated(revise, "replaces", False))


def ends_at_end_tokens(rule: Any) -> bool:
    """Whether the stop rule ends rows at end-of-sequence tokens only."""
    return all(stated(rule, "at_end_tokens", False))


def is_normalised(transform: Any) -> bool:
    """Whether a transform makes a law of a law, so that nothing is left to normalise."""
    return all(stated(transform, "normalised", False))


def is_exchangeable(cache: Any) -> bool:
    """Whether another cache policy may take this one's place without changing what the strategy is."""
    return all(stated(cache, "exchangeable", True))
