from mxtrain.data.text_report import TextReport


def test_report_of_a_tokenized_text():
    report = TextReport(
        dataset="python",
        folder="/cache/python-1",
        vocab_size=2048,
        requested_vocab_size=2048,
        files=1790,
        documents=1717,
        bytes=30_500_000,
        train_tokens=10_013_521,
        validation_documents=9,
        validation_tokens=46_623,
        dropped={"duplicate": 19, "machine-made": 22, "unreadable": 0},
        separators="begins with '<s>'",
        cut={name: size * 1_000_000 for size, name in enumerate(["f", "e", "d", "c", "b", "a"], 1)},
    )
    assert str(report).splitlines() == [
        "dataset       python",
        "files         1,790 found",
        "documents     1,717 kept, 30.5 MB (9 of them for validation)",
        "tokens        10,013,521 train, 46,623 validation",
        "dropped       19 duplicate, 22 machine-made",
        "packages cut  a by 6.0 MB, b by 5.0 MB, c by 4.0 MB, d by 3.0 MB, e by 2.0 MB, and 1 more",
        "tokenizer     2,048 tokens",
        "document      begins with '<s>'",
        "folder        /cache/python-1",
    ]
    said = "1,717 documents, 30.5 MB; each document begins with '<s>'; left out: 19 duplicate, 22 machine-made"
    assert report.line == said


def test_report_of_a_stream_and_a_smaller_vocabulary():
    table = str(TextReport("hf", "/cache/hf-1", vocab_size=900, requested_vocab_size=2048, streamed=True))
    assert "streamed: not counted" in table
    assert "900 tokens (2,048 requested; the text has no more pairs to merge)" in table
    assert "0 train" not in table
