"""draftloop.trainer"""
