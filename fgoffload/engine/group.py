"""Groups, and the lanes in which backward walks them back."""

import enum
import weakref

import torch

from fgoffload.engine.identity import get_key, has_bytes
from fgoffload.engine.place import Place
from fgoffload.engine.saved import SavedState, SavedStorage
from fgoffload.engine.stats import KeptReason, TagStats
from fgoffload.plan import Site


class GroupState(enum.Enum):
    """How far one execution of a site has come."""

    SAVING = enum.auto()  # forward is in the site, or behind it and before its end
    HELD = enum.auto()  # ended, and waiting for `OffloadEngine.flush`
    SUBMITTED = enum.auto()  # what may leave is on its way or gone
    SPENT = enum.auto()  # backward has left the site


class Group:
    """What one execution of a site saves for one microbatch: the tensors that move together."""

    __slots__ = (
        "__weakref__",
        "_kept",
        "_passed",
        "_saved",
        "ahead_bytes",
        "end_position",
        "filtered",
        "moved_bytes",
        "passed_bytes",
        "passed_tensors",
        "place",
        "position",
        "saved_tensors",
        "site",
        "state",
        "stats",
    )

    def __init__(self, place: Place, stats: TagStats, *, position: int) -> None:
        self.place = place
        """The site and the microbatch."""
        self.stats = stats
        """Of the site's tag."""
        self.state = GroupState.SAVING
        self.position = position
        """The groups of the lane before this one."""
        self.end_position = position + 1
        """The groups of the lane when this one ended: itself, those before it, and those between its region and its end."""
        self.moved_bytes = 0
        """Bytes that left for the host with this group."""
        self.ahead_bytes = 0
        """Of what was called back before backward came to the group."""
        self.site: Site | None = None
        """Set where each execution saves the same in the same order, so that one teaches something about the next."""
        self._kept: dict[int, dict[tuple[int, int], int]] = {}
        """What `count_kept` has counted: by storage, the bytes of each tensor, by its address and size."""
        self.filtered: set[int] = set()
        """Of the lane."""
        self.saved_tensors = 0
        """Saved through the engine."""
        self.passed_tensors = 0
        """Saved past the engine, since they never move. A group is one thread's: for the tag they count when it ends."""
        self.passed_bytes = 0
        """Of those that are too small to move."""
        self._passed: set[int] = set()
        """The keys of the storages that `pass_small` has counted. Their handles keep these from being used again."""
        self._saved: dict[int, weakref.ref[SavedStorage]] = {}

    @property
    def is_unused(self) -> bool:
        """Whether autograd saved nothing in it so far."""
        return not (self.saved_tensors or self.passed_tensors)

    def add(self, saved: SavedStorage) -> None:
        """Let `saved` move with this group."""
        if self.state is GroupState.SAVING:
            self._saved[id(saved)] = weakref.ref(saved)  # weakly: see [Note: What owns what]

    def count_kept(self, tensor: torch.Tensor, reason: KeptReason) -> None:
        """Count `tensor`, which stays: what several ops save once, and of a storage no more than it has."""
        size_bytes = tensor.numel() * tensor.element_size()
        if type(tensor) is torch.Tensor and has_bytes(tensor):
            kept = self._kept.setdefault(get_key(tensor), {})
            where = (tensor.data_ptr(), size_bytes)
            if where in kept:
                return
            size_bytes = min(size_bytes, tensor.untyped_storage().nbytes() - sum(kept.values()))
            kept[where] = size_bytes
        self.stats.add_kept(reason, size_bytes)

    def pass_small(self, tensor: torch.Tensor) -> None:
        """Count `tensor`, all of whose storage is too small to leave with this group or another one; a storage once."""
        self.passed_tensors += 1
        key = get_key(tensor)
        if key not in self._passed:
            self._passed.add(key)
            self.passed_bytes += tensor.untyped_storage().nbytes()

    def submit(self) -> list[SavedStorage]:
        """Return what the group saved and autograd still wants."""
        self.state = GroupState.SUBMITTED
        saved = self._list_living()
        self.stats.dropped_storages += len(self._saved) - len(saved)
        for storage in saved:
            storage.uses += 1
        return saved

    def spend(self) -> None:
        """Backward has left: autograd alone decides how long the tensors are wanted."""
        if self.state is GroupState.SAVING:
            return  # a backward inside of the region, which saves on after it
        if self.state is GroupState.SUBMITTED:
            for saved in self._list_living():
                saved.uses -= 1
        self.state = GroupState.SPENT

    def list_saved(self, *states: SavedState) -> list[SavedStorage]:
        """Return the saved storages that autograd still wants and that are in one of `states`, in the order of saving."""
        references = self._saved.values()
        return [saved for reference in references if (saved := reference()) is not None and saved.state in states]

    def _list_living(self) -> list[SavedStorage]:
        return [saved for reference in self._saved.values() if (saved := reference()) is not None]


class Lane:
    """The groups of one microbatch in one model chunk, in the order in which forward reached them.

    Backward asks for them from the last to the first. What it does in between the lanes is the pipeline schedule's business,
    and nothing here depends on it.
    """

    __slots__ = ("_leftover", "_name", "ahead_bytes", "away", "end", "filtered", "groups", "let_go_bytes", "place")

    def __init__(self, *, chunk: int, microbatch: int) -> None:
        self._name = f"mb={microbatch}" if chunk == 0 else f"mb={microbatch} chunk={chunk}"
        self.place = Place(None, self._name)
        """The microbatch, and the chunk where it is not the first."""
        self.groups: list[Group] = []
        """In the order of forward."""
        self.end = 0
        """Backward has left all groups but the first so many."""
        self.away = 0
        """The first so many groups have not been called back."""
        self.ahead_bytes = 0
        """Of all groups."""
        self.let_go_bytes = 0
        """What backward took of layers of which nothing left: it lets go of it when the op that asked is done."""
        self._leftover: list[Group] = []
        self.filtered: set[int] = set()
        """The keys of storages of which the user's filter kept a tensor. They stay whole: moving the rest frees nothing."""

    def add(self, site: Site, stats: TagStats) -> Group:
        """Return a new group of `site`, behind the others.

        Args:
            site: What it is a group of.
            stats: Of the site's tag.
        """
        groups = self.groups
        if self.away < len(groups):
            for called in groups[self.away :]:
                self.expect(called, 0)  # forward goes on, and backward comes to them last: they must not hold up those behind
        group = Group(Place(site, self._name), stats, position=len(groups))
        group.filtered = self.filtered
        groups.append(group)
        self.end = self.away = len(groups)
        return group

    def expect(self, group: Group, size_bytes: int) -> None:
        """Take note that `size_bytes` of `group` are called back before backward has come to it; 0 when it has."""
        self.ahead_bytes += size_bytes - group.ahead_bytes
        group.ahead_bytes = size_bytes

    def is_news(self, group: Group, *, is_away: bool) -> bool:
        """Return whether a tensor of `group` that backward takes shows that backward has come to the group.

        Not where it was known already. Of a group that backward has left, what is on the host only shows that another backward
        of the same graph has begun; ops of other branches take what they want late, and nothing of it is away. A group may have
        been called back while backward was behind all groups, or in one inside of it: what it brought back counts as ahead
        until then, and holds up what is before it.

        Args:
            group: In this lane.
            is_away: Whether the tensor is on the host only.
        """
        if self.end > group.end_position or self.away > group.position:
            return True
        return group.position >= self.end if is_away else group.ahead_bytes > 0

    def leave(self, position: int) -> list[Group]:
        """Take note that backward has left the groups from `position` on, and return those that it left the time before.

        One time late, because ops between two regions, as the rotary embedding, may share the storages of the region that
        backward has just left. A position behind the end means that another backward of the same graph has begun.
        """
        if position > self.end:
            self.end = self.away = position
        left = self.groups[position : self.end]
        if not left:
            return []
        self.end = position
        self.away = min(self.away, position)
        for group in left:
            group.spend()
            if group.ahead_bytes:
                self.expect(group, 0)
        leftover, self._leftover = self._leftover, left
        return leftover
