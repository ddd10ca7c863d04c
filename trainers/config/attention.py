"""Which kernel computes the attention of a decoder, and why. Free of JAX: the dry run says it too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

KERNELS = ("auto", "xla", "blockwise", "cudnn", "splash")
"""Values of `model.attention`, beside `package.module:function`."""
EXCHANGES = ("auto", "gather", "ring")
"""Values of `model.context_attention`."""
NEEDS = {"cudnn": "gpu", "splash": "tpu"}
"""The platform that a kernel needs; the others run everywhere."""

DENSE_UP_TO_TOKENS = 2048
"""Of longer sequences the scores of all pairs of tokens, [B, H, T, T], are not kept in memory."""
SPLASH_BLOCK_TOKENS = 128
CUDNN_MAX_CHANNELS, CUDNN_CHANNELS_MULTIPLE = 128, 8
CUDNN_TYPES = ("bfloat16", "float16")
OF_PARTS = ("auto", "blockwise")
"""Values of `model.attention` on devices that share a sequence."""
RING_FROM_TOKENS = {"tpu": 65_536}
"""By platform: from this length on, keys and values go around. On a TPU the devices of an axis are a ring of links, and the
attention to one part takes longer than its exchange."""
RING_FROM_TOKENS_ELSEWHERE = 262_144
"""From this length on, the keys and values of a whole sequence are too large to have them at once."""


class Needs(NamedTuple):
    """What a kernel must be able to do for a model."""

    length: int
    """Tokens of a sequence, T."""
    channels: int
    """Channels of a head."""
    dtype: str
    softcap: bool
    """The scores are kept within bounds by a tanh."""
    context: int = 1
    """The devices that share a sequence (`mesh.context`)."""


class Choice(NamedTuple):
    kernel: str
    reason: str


def needs_of(model: Any, length: int, dtype: str, context: int = 1) -> Needs:
    """`model` is a `ModelConfig`."""
    return Needs(length, model.channels, dtype, softcap=model.attention_softcap is not None, context=context)


def choose(asked: str, platform: str | None, needs: Needs) -> Choice:
    """Returns the kernel for `model.attention` = `asked` on hosts of `platform` (`cpu`, `gpu` or `tpu`)."""
    if asked != "auto":
        return Choice(asked, "model.attention")
    if needs.context > 1:
        return Choice("blockwise", f"{needs.context} devices share a sequence")
    for kernel, wanted in NEEDS.items():
        if platform == wanted:
            problem = next(problems(kernel, needs), None)
            if problem is None:
                return Choice(kernel, f"the kernel for a {platform.upper()}")
            return Choice(everywhere(needs.length).kernel, f"not {kernel}: {problem}")
    return everywhere(needs.length)


def choose_exchange(asked: str, platform: str | None, length: int) -> Choice:
    """Returns `gather` or `ring`, for `model.context_attention` = `asked` on hosts of `platform`."""
    if asked != "auto":
        return Choice(asked, "model.context_attention")
    limit = RING_FROM_TOKENS.get(platform or "", RING_FROM_TOKENS_ELSEWHERE)
    where = f" on a {platform.upper()}" if platform in RING_FROM_TOKENS else ""
    if length < limit:
        return Choice("gather", f"less than {limit:,} tokens{where}")
    return Choice("ring", f"{limit:,} tokens or more{where}")


def everywhere(length: int) -> Choice:
    """Returns the better of the two kernels that run on every platform."""
    if length <= DENSE_UP_TO_TOKENS:
        return Choice("xla", f"{length} tokens are few")
    return Choice("blockwise", f"the scores of {length} x {length} tokens are not kept in memory")


def problems(kernel: str, needs: Needs) -> Iterator[str]:
    """Yields why a kernel cannot compute the attention of a model."""
    if needs.context > 1 and kernel not in OF_PARTS:
        yield f"it computes whole sequences, and mesh.context = {needs.context} divides them"
    if kernel == "cudnn":
        if needs.dtype not in CUDNN_TYPES:
            yield f"dtype is {needs.dtype}, and it takes {' or '.join(CUDNN_TYPES)}"
        if needs.channels > CUDNN_MAX_CHANNELS or needs.channels % CUDNN_CHANNELS_MULTIPLE:
            yield (
                f"a head has {needs.channels} channels, and it takes a multiple of {CUDNN_CHANNELS_MULTIPLE} up to "
                f"{CUDNN_MAX_CHANNELS}"
            )
        if needs.softcap:
            yield "the model has an attention_softcap, which it does not know"
    if kernel == "splash" and needs.length % SPLASH_BLOCK_TOKENS:
        yield f"a sequence has {needs.length} tokens, and it takes a multiple of {SPLASH_BLOCK_TOKENS}"


OTHERS = f"take auto, or another of {', '.join(KERNELS[1:])}"


def check(asked: str, needs: Needs) -> Iterator[str]:
    """Yields why `model.attention` = `asked` cannot be on any host."""
    for problem in problems(asked, needs):
        others = f"take {' or '.join(OF_PARTS)}" if needs.context > 1 else OTHERS
        yield f"model.attention = {asked!r}: {problem}; {others}"


def check_platform(asked: str, platform: str | None) -> Iterator[str]:
    """Yields why `model.attention` = `asked` cannot be on hosts of `platform`."""
    wanted = NEEDS.get(asked, platform)
    if wanted != platform:
        yield f"model.attention = {asked!r}: expected {str(wanted).upper()} hosts, found {str(platform).upper()} hosts; {OTHERS}"
