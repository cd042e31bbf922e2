PART = "smollm2-part"  # a folder; see make_expected.py
