"""The use of loaded versions: their requests and sequences, and those of ensembles."""

from gateway.models.model import Model


class VersionUsage:
    """The use of a loaded version; `by` are those of the ensembles that call it.

    Implements `InUse`.
    """

    def __init__(self, model: Model) -> None:
        self.by: list[VersionUsage] = []
        self._model = model

    def __len__(self) -> int:
        return len(self._model.requests)

    @property
    def present(self) -> bool:
        """Whether it is in a rollout, or it or an ensemble that calls it has requests or sequences.

        Only open sequences count.
        """
        sequences = self._model.scheduler.sequences
        if self.pinned or self._model.requests or (sequences is not None and sequences.are_open):
            return True
        return any(each.present for each in self.by)

    @property
    def pinned(self) -> str:
        """The reason why it stays in memory: a rollout."""
        chooser = self._model.chooser
        return "in a rollout" if chooser is not None and chooser.pins(self._model) else ""
