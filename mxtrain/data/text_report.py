"""The report of a prepared text that ``mxtrain prepare`` prints."""

from dataclasses import dataclass, field

from mxtrain.data.progress import megabytes


@dataclass(frozen=True)
class TextReport:
    """Counts of one prepared text. A streamed dataset has a tokenizer; its files, documents and tokens count 0."""

    dataset: str
    folder: str
    vocab_size: int
    """Size of the tokenizer"""

    requested_vocab_size: int
    """Size requested for a new tokenizer; 0 for an existing tokenizer"""

    streamed: bool = False
    files: int = 0
    """Files found, before any is dropped"""

    documents: int = 0
    """Documents kept, for training and validation together"""

    bytes: int = 0
    """UTF-8 bytes of these documents"""

    train_tokens: int = 0
    validation_documents: int = 0
    validation_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Files or documents left out, by reason: "duplicate", "machine-made", "over the package share", ..."""

    cut: dict[str, int] = field(default_factory=dict)
    """Bytes cut from each package that exceeded its share"""

    separators: str = ""
    """Which tokens separate documents, in words; "" if none do, or if an earlier version has prepared the text"""

    @property
    def line(self) -> str:
        """The text in one line, with all that is left out."""
        text = "streamed" if self.streamed else f"{self.documents:,} documents, {megabytes(self.bytes)}"
        text += f"; each document {self.separators}" if self.separators else ""
        return text + (f"; left out: {self._left_out}" if self._left_out else "")

    @property
    def _left_out(self) -> str:
        return ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items() if count)

    def __str__(self) -> str:
        rows = {"dataset": self.dataset}
        if self.streamed:
            rows["text"] = "streamed: not counted, not kept"
        else:
            rows["files"] = f"{self.files:,} found"
            rows["documents"] = (
                f"{self.documents:,} kept, {megabytes(self.bytes)} "
                f"({self.validation_documents:,} of them for validation)"
            )
            rows["tokens"] = f"{self.train_tokens:,} train, {self.validation_tokens:,} validation"
            rows["dropped"] = self._left_out or "none"
            if self.cut:
                largest = sorted(self.cut.items(), key=lambda item: -item[1])
                parts = [f"{name} by {megabytes(size)}" for name, size in largest[:5]]
                more = f", and {len(largest) - 5} more" if len(largest) > 5 else ""
                rows["packages cut"] = ", ".join(parts) + more
        rows["tokenizer"] = f"{self.vocab_size:,} tokens"
        if self.vocab_size < self.requested_vocab_size:
            rows["tokenizer"] += f" ({self.requested_vocab_size:,} requested; the text has no more pairs to merge)"
        if self.separators:
            rows["document"] = self.separators
        rows["folder"] = self.folder
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())
