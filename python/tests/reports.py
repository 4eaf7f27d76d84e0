"""A model for the scenarios `progress` of both packages. Each item names a file, and is reported on until the file exists."""

import os
import time

import vramq


class Reports(vramq.Model):
    accepts = ["text"]

    def run(self, items, params):
        for item in items:
            while not os.path.exists(item.text):
                self.progress(item, 0.25, "a quarter, ñ")
                time.sleep(0.02)
            yield "seen"


vramq.serve(Reports)
