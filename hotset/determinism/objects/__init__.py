"""Strangers' objects: what they hold and reach, and which names their code reads.

==================================================  ==========================================
question                                            module
==================================================  ==========================================
How is an object asked that may raise?              :mod:`.safe_access`
What does an object reach?                          :mod:`.object_graph`
Which globals and modules does code use?            :mod:`.code_dependencies`
Are a memoised function's names bound anew?         :mod:`.bindings`
Which names does a dataset's reading code use?      :mod:`.reading_names`; outside of it:
                                                    :mod:`.outer_names`
What was there before a generator was made?         :mod:`.near_attributes`
What does ``functools.lru_cache`` keep?             :mod:`.memos`
What did objects hold, and code outside of them?    :mod:`.names`
What did one of these values hold?                  :mod:`.held_values`
Which names do the threads that run use?            :mod:`.thread_names`
What does an array, a table or a container hold?    :mod:`.mutable_content`
==================================================  ==========================================
"""
