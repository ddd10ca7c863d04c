"""Commands about runs, by the files of their folders: what they are, how they compare, and requests to those that go on."""
