"""Speed over plain decoding with the draft worker some milliseconds away, with simulated forwards."""
