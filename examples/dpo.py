"""A synthetic set of preferences: of two greetings of a name, the one in small letters is chosen."""

from trainers.data.sources.preference import pairs
from trainers.text import tokenizers

WORDS = ("hello", "welcome", "good morning", "nice to see you")


class Greetings:
    """Records with the columns of a preference: texts."""

    columns = ("prompt", "chosen", "rejected")

    def __init__(self, first, last):
        self.numbers = range(first, last)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        number = self.numbers[index]
        greeting = f"{WORDS[number % len(WORDS)]}, {chr(97 + number % 26)}."
        return {"prompt": f"to {number}: ", "chosen": greeting, "rejected": greeting.upper()}

    def where(self, index):
        return f"greeting {self.numbers[index]}"


def greetings(arguments):
    tokenizer = tokenizers.of(arguments)
    return tuple(pairs(records, tokenizer, arguments) for records in (Greetings(0, 400), Greetings(400, 440)))
