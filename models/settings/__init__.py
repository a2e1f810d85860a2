"""Settings of the mixers, a file per kind. Torch-free.

A kind is a file models/mixers/NAME.py. Its settings class is in models/settings/NAME.py, so that a configuration can be read, and
planned for, without torch. A mixer's own file may define the class instead; then reading the configuration imports torch.

A kind may also be defined in a package of one's own: its module is named by `imports` in the run file, or by an entry point of the
group baton.mixers, whose name is the kind.
"""

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

from baton.models.settings.cost_model import MixerCosts
from baton.models.settings.declarations import ParameterDeclaration, StateDeclaration, prefixed

SMALL_WIDTH = 12
"""The d_model of every mixer's `small` settings: divisible over four tensor ranks, with head widths that are no powers of two."""

ENTRY_POINTS = "baton.mixers"
"""Group of entry points of installed packages: kind = module."""

_KINDS: dict[str, "type[MixerConfig]"] = {}


class MixerConfig(BaseModel):
    """Settings of one kind of mixer, and what it declares. Subclasses add `kind: Literal["NAME"] = "NAME"` and described fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str

    once: ClassVar[Mapping[str, Any]] = {}
    """What models meant that were made before a setting was added or its default was changed, where that is not its default now."""

    mixer_module: ClassVar[str | None] = None
    """The module that defines the mixer of a kind that is not Baton's; None: the settings' own module."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        name = cls.model_fields["kind"].default
        if isinstance(name, str):
            _KINDS[name] = cls

    def sizes(self, d_model: int) -> dict[str, int]:
        """Sizes that are split over the tensor group, by setting. Each must be a multiple of the number of tensor ranks."""
        return {}

    @property
    def state_grows(self) -> bool:
        """Whether the State grows with every token, so that it cannot be sent from rank to rank."""
        return False

    @property
    def longest_tail(self) -> int:
        """Number of previous tokens that the State keeps (of a convolution or window). A context-parallel rank's span must be at
        least this long."""
        return 0

    def note(self, tokens: int) -> str | None:
        """A one-line warning for runs whose documents have at most `tokens` tokens; None: no warning."""
        return None

    def check(self, d_model: int) -> None:
        """Raises ValueError, which names a setting to change, for settings that do not fit d_model."""

    def hands_on(self, d_model: int) -> dict[str, int]:
        """Widths of the tensors that it hands on to later layers beside the residual stream (ForwardContext.shared), by name."""
        return {}

    def reads(self, d_model: int) -> dict[str, int]:
        """Widths of the tensors of that kind that it reads, by name."""
        return {}

    @property
    def nested(self) -> "dict[str, MixerConfig]":
        """Mixers that are parts of this one, by the name of the part."""
        return {}

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        """The mixer's own parameters, without those of nested mixers. Modules, layouts, checkpoints and the planner read these
        declarations."""
        return ()

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        """The State of one sequence, without that of nested mixers."""
        return ()

    def activation_costs(self, d_model: int) -> MixerCosts:
        """Saved activations, recurrences and FLOPs, which do not follow from the declarations. Raises ValueError for a kind that
        does not define this method."""
        raise ValueError(f"kind {self.kind} does not say what it costs; give {type(self).__name__} a method activation_costs")

    def state_by_name(self, d_model: int) -> dict[str, StateDeclaration]:
        """The declarations of `state`, by name."""
        return {state.name: state for state in self.state(d_model)}

    def all_parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        """The parameters of the mixer and of its nested mixers."""
        nested = (d for name, mixer in self.nested.items() for d in prefixed(name, mixer.all_parameters(d_model)))
        return (*(d.nested() for d in nested), *self.parameters(d_model))

    def all_state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        """The State of the mixer and of its nested mixers."""
        nested = (s for name, mixer in self.nested.items() for s in prefixed(name, mixer.all_state(d_model)))
        return (*nested, *self.state(d_model))

    def costs(self, d_model: int) -> MixerCosts:
        """Costs of the mixer with its nested mixers, for the planner. Raises ValueError as `activation_costs`."""
        try:
            hash(self)
        except TypeError:  # a kind of one's own with a list or a dict
            return self._costs(d_model)
        return _known_costs(self, d_model)

    def _costs(self, d_model: int) -> MixerCosts:
        return self._with_nested(d_model).of(self.all_parameters(d_model))

    def _with_nested(self, d_model: int) -> MixerCosts:
        costs = self.activation_costs(d_model)
        for name, mixer in self.nested.items():
            costs = costs.plus_nested(name, mixer._with_nested(d_model))
        return costs

    @classmethod
    def small(cls) -> Self:
        """Settings of a small mixer for tests, at d_model = SMALL_WIDTH.

        Tests that hold for every kind of mixer (split invariance, tensor and context parallelism, decoding, costs) are parametrized
        over `kinds()` and build each kind from this. Its sizes differ from each other, so that swapped dimensions fail, and divide
        over four tensor ranks. Options that are off by default are tested in the mixer's own tests.
        """
        return cls()  # type: ignore[call-arg]


@lru_cache(maxsize=64)
def _known_costs(settings: MixerConfig, d_model: int) -> MixerCosts:
    """Kept, because a plan compares many layouts of one model."""
    return settings._costs(d_model)


@cache
def kinds() -> "dict[str, type[MixerConfig]]":
    """The settings class of every kind, one for each file in models/mixers."""
    here = Path(__file__).parent
    names = sorted(path.stem for path in (here.parent / "mixers").glob("*.py") if path.stem != "__init__")
    for name in names:
        import_module(f"baton.models.{'settings' if (here / f'{name}.py').exists() else 'mixers'}.{name}")
        if name not in _KINDS:
            raise TypeError(
                f"models/mixers/{name}.py: no MixerConfig subclass with kind {name!r} there or in models/settings/{name}.py"
            )
    return {name: _KINDS[name] for name in names}


def import_kinds(modules: Iterable[str]) -> None:
    """Import modules that define kinds of mixers. Raises ValueError for one that cannot be imported or takes another's kind."""
    for name in modules:
        _import_kind_module(name)


def settings_class(kind: str) -> "type[MixerConfig] | None":
    """The settings class of a kind: Baton's, an imported module's or an installed package's; None: there is none.

    Raises ValueError for an entry point whose module cannot be imported or defines no such kind.
    """
    if kind in kinds() or kind in _KINDS:
        return kinds().get(kind) or _KINDS[kind]
    found = [entry for entry in entry_points(group=ENTRY_POINTS) if entry.name == kind]
    if not found:
        return None
    if len({entry.value for entry in found}) > 1:
        raise ValueError(
            f"the kind {kind!r} has several entry points of {ENTRY_POINTS}: {', '.join(sorted(entry.value for entry in found))}; "
            f"name the module that is meant in `imports`"
        )
    _import_kind_module(found[0].module)
    if kind not in _KINDS:
        raise ValueError(f"the entry point {ENTRY_POINTS}: {kind} = {found[0].value} defines no MixerConfig with kind {kind!r}")
    return _KINDS[kind]


def _import_kind_module(name: str) -> None:
    before = {**_KINDS, **kinds()}
    try:
        import_module(name)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{name} cannot be imported ({type(error).__name__}: {text}); install its package, or put its folder into PYTHONPATH"
        ) from error
    for kind, cls in before.items():
        if _KINDS[kind] is not cls and _KINDS[kind].__module__ != cls.__module__:
            other, _KINDS[kind] = _KINDS[kind], cls
            raise ValueError(f"{other.__module__} defines the kind {kind!r}, which {cls.__module__} has; give it another name")
