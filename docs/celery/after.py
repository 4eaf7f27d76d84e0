import os

from vramq.celery import App

app = App(os.environ["BROKER_URL"])
embed = app.task("minilm")
